#!/bin/bash
# Two "hosts" on this machine: network namespaces joined by a rate-limited link, one rank on each, joined as under
# torchrun. Needs root and iproute2. usage: scripts/two_hosts.sh BUILD_FOLDER DATA_PREFIX [RATE] [key=value ...]
set -euo pipefail
build=$(realpath "$1"); data=$(realpath -m "$2"); rate=${3:-200mbit}
shift; shift; shift || true
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
out=$(mktemp -d)
a=dm-a-$$ b=dm-b-$$
cleanup() {
  local code=$?
  # shellcheck disable=SC2046
  kill $(jobs -p) 2>/dev/null || true
  ip netns del "$a" 2>/dev/null || true
  ip netns del "$b" 2>/dev/null || true
  rm -rf "$out"
  exit "$code"
}
trap cleanup EXIT
ip netns add "$a"; ip netns add "$b"
ip link add veth0 netns "$a" type veth peer name veth0 netns "$b"
for side in "$a 10.77.0.1" "$b 10.77.0.2"; do
  set -- $side "$@"
  ip -n "$1" addr add "$2/24" dev veth0
  ip -n "$1" link set veth0 up
  ip -n "$1" link set lo up
  ip netns exec "$1" tc qdisc add dev veth0 root tbf rate "$rate" burst 256kb latency 20ms
  shift; shift
done
sleep 2  # a fresh veth is "not available" to UCX
rank() {
  # An IPC namespace each: UCX would find shared memory around the link otherwise.
  ip netns exec "$1" unshare -i env RANK="$2" WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 \
    DISAGMOE_SECRET="${secret}" "$build/disagmoe" train "$root/configs/tiny.toml" "data.path=$data" "out=$out" \
    transport.listen=10.77.0.1 transport.net_devices=veth0 "${@:3}"
}
secret=$(openssl rand -hex 16)
rank "$b" 1 "$@" &
other=$!
rank "$a" 0 "$@"
wait "$other"
sent() { ip netns exec "$1" cat /sys/class/net/veth0/statistics/tx_bytes; }
echo "link at $rate: $(sent "$a") bytes from the attention host, $(sent "$b") from the FFN host"
"$build/disagmoe" verify "$out" --sample 0
