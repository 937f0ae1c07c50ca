// The inside of UcxTransport. All of UCX and all tables belong to one thread; others only push commands.
#pragma once

#include <memory>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

#include "transport/match_table.h"
#include "transport/ucx_context.h"

namespace disagmoe {

class UcxTransport::Engine {
 public:
  explicit Engine(UcxOptions options);
  ~Engine();

  // From any thread.
  RequestPtr Post(RequestPtr request, Buffer buffer, const SendStamps& stamps);
  void Abort(const std::string& reason);
  void Leave() { quiet_ = true; }

  void Connect(const std::vector<std::string>& addresses);
  const std::string& address() const { return address_; }
  const UcxOptions& options() const { return options_; }
  const TransportCounters& counters() const { return counters_; }
  BufferPool& pool() { return pool_; }

 private:
  // Besides data: I listen to you; I leave; I have heard that you leave; I leave because of an abort.
  enum class What : uint32_t { kData, kHello, kBye, kByeAck, kAbort };
  struct WireHeader {
    uint64_t token;
    int32_t src;
    uint32_t step;
    int32_t stage;
    int32_t micro_batch;
    uint32_t kind;  // MessageKind, of data
    What what;
    SendStamps stamps;
  };
  enum class PeerState { kHere, kLeft, kLost };
  struct Peer {
    Engine* engine = nullptr;
    int rank = 0;
    UcxAddress address;
    ucp_ep_h tx = nullptr;  // my sending worker to its receiving worker
    ucp_ep_h rx = nullptr;  // my receiving worker to its sending worker: reports its death to my receives
    PeerState state = PeerState::kHere;
    std::string reason;     // why not kHere
    bool told = false;      // that we leave
    bool answered = false;  // our farewell, or said its own
    int64_t suspect_ns = 0; // when UCX first reported an error; 0: none
    ucs_status_t error = UCS_OK;
    std::vector<RequestPtr> orphans;  // their operation failed; they fail when the peer's state is clear
  };
  struct Command {
    RequestPtr request;
    Buffer buffer;
    SendStamps stamps;
  };
  // Something UCX works on. It lives until UCX is done with its memory, even where the request has failed before.
  struct Op {
    Engine* engine = nullptr;
    Peer* peer = nullptr;
    RequestPtr request;  // null: nobody waits (a farewell, or failed before)
    Buffer buffer;
    WireHeader header{};
    bool is_send = true;
  };
  struct Parcel {
    Buffer buffer;         // of a small message
    void* desc = nullptr;  // of a large one: UCX's handle to pull it
    size_t size = 0;
    SendStamps stamps;
  };
  struct Arrival {
    What what = What::kData;
    SourceKey key;
    Parcel parcel;
  };

  // UCX calls these inside progress; they only take notes.
  static ucs_status_t OnMessage(void* engine, const void* header, size_t header_size, void* data, size_t size,
                                const ucp_am_recv_param_t* param);
  static void OnSent(void* request, ucs_status_t status, void* op);
  static void OnPulled(void* request, ucs_status_t status, size_t size, void* op);
  static void OnClosed(void* request, ucs_status_t status, void* engine);
  static void OnError(void* peer, ucp_ep_h ep, ucs_status_t status);

  void Run();
  void Turn(int64_t until_ns);
  bool Idle();
  bool RunCommands();
  bool HandleArrivals();
  void Send(Command command);
  void Receive(RequestPtr request);
  void Arrive(Arrival& arrival);
  void ArriveControl(What what, Peer& peer);
  void ArriveData(SourceKey key, Parcel parcel, Peer& peer);
  void Accept(const RequestPtr& request, Parcel parcel, Peer& peer);
  void Pull(const RequestPtr& request, Parcel parcel, Peer& peer);
  void Finish(Op* op, ucs_status_t status);
  void SendControl(Peer& peer, What what);
  ucp_ep_h Endpoint(Peer& peer, bool tx);
  void CloseEndpoints(Peer& peer, bool force);
  void Suspect(Peer& peer, ucs_status_t status);
  void ResolveSuspects();
  void Lose(Peer& peer, const std::string& reason);
  void FailPeer(Peer& peer, bool drop_arrived);
  void Drop(Parcel& parcel);
  void FailAll(const std::string& reason);
  void SweepAbort();
  void SayFarewell(Peer& peer);
  void Close();

  const UcxOptions options_;
  TransportCounters counters_;
  BufferPool pool_;
  std::unique_ptr<UcxContext> context_;
  std::string address_;
  std::atomic<bool> quiet_{false};

  std::mutex mutex_;
  std::vector<Command> commands_;
  std::string abort_reason_;
  bool aborted_ = false;
  bool stop_ = false;
  bool connected_ = false;
  bool sleeping_ = false;

  // Of the thread alone.
  std::vector<Peer> peers_;
  MatchTable<Parcel> table_;
  std::vector<Arrival> arrivals_;
  std::unordered_set<Op*> ops_;
  std::vector<Peer*> suspects_;
  size_t unexpected_bytes_ = 0;
  int closing_ = 0;         // endpoints
  bool abort_seen_ = false;
  bool ending_ = false;     // the destructor runs
  bool farewell_ = false;   // and says good-bye
  std::thread thread_;      // last: it uses all of the above
};

}  // namespace disagmoe
