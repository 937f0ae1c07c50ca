#!/usr/bin/env python3
"""Text to training data, and back, through a Hugging Face tokenizer.json. Needs only the `tokenizers` wheel.

    hf_tokenizer.py prepare --tokenizer FOLDER --out PREFIX [--workers N] [--eod TOKEN] FILE...
    hf_tokenizer.py serve --tokenizer FOLDER

`disagmoe data --tokenizer` starts the first, `disagmoe generate` the second. prepare writes PREFIX.bin and PREFIX.idx
as docs/formats.md says, the same bytes whatever N is. serve first prints {"vocab_size": .., "eod": ..}, then answers
each line on standard input, {"encode": "text"} or {"decode": [ids]}, with {"ids": [..]} or {"text": ".."}, or with
{"error": ".."}.

A user's fault is one line on standard error and exit code 2; with --json, and from serve, also (from serve: only)
{"error": {"what": ..}} on standard output, with the parts of base/error.h.
"""

import argparse
import array
import collections
import concurrent.futures
import contextlib
import fcntl
import gzip
import json
import multiprocessing
import os
import signal
import sys
import threading
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # parallel by processes, each over documents of its own

BATCH_BYTES = 1 << 20  # of text that a worker gets at once; does not change what comes out
MAX_LINE = 1 << 30
MAX_TOKENS = 2**31 - 1  # of a document: its length is an i32


class Error(Exception):
    """The parts of base/error.h, and their line. Picklable, so that it may come from a worker."""

    def __init__(self, what, where="", got="", expected="", hint=""):
        super().__init__(what, where, got, expected, hint)

    def parts(self):
        return {k: v for k, v in zip(("what", "where", "got", "expected", "hint"), self.args) if v}

    def line(self):
        what, where, got, expected, hint = self.args
        line = what + (f" ({where})" if where else "") + (f": got {got}" if got else "")
        if expected:
            line += (", " if got else ": ") + f"expected {expected}"
        return line + (f". Hint: {hint}" if hint else "")


def read_json(path):
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise Error("cannot read the file", path, e.strerror)
    except ValueError as e:
        raise Error("not JSON", path, str(e))


def tokenizer_file(path):
    name = os.path.join(path, "tokenizer.json") if os.path.isdir(path) else path
    if not os.path.isfile(name):
        raise Error("no tokenizer", name, "no such file", "a tokenizer.json or a folder that has one",
                    "AutoTokenizer.from_pretrained(..).save_pretrained(..) of transformers writes one")
    return name


def load_tokenizer(path):
    import tokenizers
    try:
        tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file(path))
    except Error:
        raise
    except Exception as e:  # the wheel throws nothing more precise
        raise Error("not a tokenizer that the tokenizers wheel reads", tokenizer_file(path),
                    f"{str(e)[:200]} (wheel {tokenizers.__version__})")
    # A document is not to be cut or filled up, whatever the file says.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def vocabulary(tokenizer):
    """One more than the largest id: ids may have holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of_document(tokenizer, path, wanted):
    """The id that ends a document: of `wanted`, a token or an id, or as the files beside tokenizer.json say."""
    if wanted:
        found = tokenizer.token_to_id(wanted)
        if found is None and wanted.isdecimal() and tokenizer.id_to_token(int(wanted)) is not None:
            found = int(wanted)
        if found is None:
            raise Error("no such token", "--eod", wanted, "a token of the vocabulary, or its id")
        return found
    folder = os.path.dirname(tokenizer_file(path)) or "."
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = read_json(os.path.join(folder, name)).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            found = tokenizer.token_to_id(token)
            if found is None:
                raise Error("the end-of-text token is not in the vocabulary", os.path.join(folder, name), str(token))
            return found
    for name in ("generation_config.json", "config.json"):
        found = read_json(os.path.join(folder, name)).get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, int) and tokenizer.id_to_token(found) is not None:
            return found
    raise Error("which token ends a document?", folder, "no eos_token in tokenizer_config.json", "--eod TOKEN")


class Input:
    """A file of text, plain or gzip, as lines of bytes."""

    def __init__(self, path):
        self.path = path
        try:
            self.raw = open(path, "rb")
            packed = self.raw.peek(2)[:2] == b"\x1f\x8b"
        except OSError as e:
            raise Error("cannot open the file", path, e.strerror)
        if path.endswith((".gz", ".dz")) and not packed:
            self.raw.close()
            raise Error("not a gzip file", path, hint="rename it if it is plain text")
        self.text = gzip.GzipFile(fileobj=self.raw) if packed else self.raw

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.raw.close()

    def lines(self):
        try:
            while line := self.text.readline(MAX_LINE + 1):
                yield line
        except (EOFError, gzip.BadGzipFile, OSError) as e:
            raise Error("damaged or incomplete gzip file" if self.text is not self.raw else "cannot read the file",
                        self.path, str(e))
        except Exception as e:  # zlib.error, which has no import-free name
            raise Error("damaged or incomplete gzip file", self.path, str(e))

    def position(self):
        return self.raw.tell()


def is_jsonl(path):
    return path.removesuffix(".gz").endswith((".jsonl", ".ndjson", ".json"))


def documents_of(source, document_bytes):
    """(where, bytes): lines of JSON, or text cut after the first blank line that finds it long enough."""
    if is_jsonl(source.path):
        for number, line in enumerate(source.lines(), 1):
            if len(line) > MAX_LINE:
                raise Error("the line is too long", f"{source.path}:{number}", "more than 1 GiB",
                            "one JSON object a line")
            if line.strip():
                yield f"{source.path}:{number}", line
        return
    parts, size, first, number = [], 0, 1, 0
    for number, line in enumerate(source.lines(), 1):
        parts.append(line)
        if document_bytes and size >= document_bytes and line.endswith(b"\n") and not line.strip(b" \t\r\n"):
            yield f"{source.path}:{first}", b"".join(parts)
            parts, size, first = [], 0, number + 1
        else:
            size += len(line)
    if parts:
        yield f"{source.path}:{first}", b"".join(parts)


def text_of(where, data, json_key):
    """The text of a document; json_key is None for plain text."""
    excerpt = "".join(chr(b) if 32 <= b < 127 else "?" for b in data[:60]) + ("..." if len(data) > 60 else "")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise Error("not UTF-8", where, f"byte 0x{data[e.start]:02x} at {e.start}", "UTF-8 text",
                    "the byte tokenizer (no --tokenizer) takes any bytes" if json_key is None else "")
    if json_key is not None:
        expected = f'an object with the string "{json_key}"'
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise Error(f"not JSON ({e})", where, excerpt, expected)
        text = value.get(json_key) if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise Error("no text in the line", where, excerpt, expected)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise Error("not Unicode", where, "half of a surrogate pair", "UTF-8 text")
    return text


worker = {}  # of a worker process: its tokenizer and settings


def start_worker(path, special, eod, wide):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()

    def leave_with_parent():  # killed, it could not end us
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    worker.update(tokenizer=load_tokenizer(path), special=special, eod=eod, type="i" if wide else "H")


def encode_batch(batch, json_key):
    """[(where, bytes)] -> tokens as they are in the file, tokens of each document, bytes of text."""
    texts = [text_of(where, data, json_key) for where, data in batch]
    encoded = worker["tokenizer"].encode_batch_fast(texts, add_special_tokens=worker["special"])
    tokens, lengths = array.array(worker["type"]), array.array("i")
    for (where, _), text, document in zip(batch, texts, encoded):
        if not text:
            continue
        if len(document.ids) >= MAX_TOKENS:
            raise Error("the document is too long", where, f"{len(document.ids)} tokens", f"fewer than {MAX_TOKENS}")
        tokens.extend(document.ids)
        tokens.append(worker["eod"])
        lengths.append(len(document.ids) + 1)
    return little_endian(tokens), lengths


def little_endian(numbers):
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class Atomic:
    """A file as folder/.name.tmp until publish(); left without, it is removed. Two writers of one name: an Error."""

    def __init__(self, path):
        self.path = path
        self.temporary = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.tmp")
        try:
            self.file = open(self.temporary, "ab", buffering=1 << 20)
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.file.truncate(0)
        except BlockingIOError:
            self.file.close()
            raise Error("another program is writing the file", path)
        except OSError as e:
            raise Error("cannot write the file", path, e.strerror)

    def write(self, data):
        try:
            self.file.write(data)
        except OSError as e:
            raise Error("cannot write the file", self.path, e.strerror)

    def close(self):
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as e:
            raise Error("cannot write the file", self.path, e.strerror)

    def publish(self):
        os.rename(self.temporary, self.path)
        folder = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
        self.temporary = None

    def discard(self):
        """Closes the file; removes it unless it was published."""
        if self.temporary:
            os.unlink(self.temporary)
            self.temporary = None
        with contextlib.suppress(OSError):  # a full disk: said before
            self.file.close()


class IndexedWriter:
    """PREFIX.bin and PREFIX.idx, a sequence a document. The old index goes before the new data has its name, the new
    index comes last: killed at any moment, there is the old pair, no index, or the new pair."""

    def __init__(self, prefix, wide):
        self.prefix, self.wide = prefix, wide
        self.lengths = array.array("i")
        self.bin = Atomic(prefix + ".bin")
        try:
            self.idx = Atomic(prefix + ".idx")
        except Error:
            self.bin.discard()
            raise

    def add(self, tokens, lengths):
        self.bin.write(tokens)
        self.lengths.extend(lengths)

    def finish(self):
        width, count = (4 if self.wide else 2), len(self.lengths)
        code = 4 if self.wide else 8
        self.idx.write(b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code]) + count.to_bytes(8, "little") +
                       (count + 1).to_bytes(8, "little"))
        self.idx.write(little_endian(self.lengths[:]))
        at, pointers = 0, array.array("q")
        for length in self.lengths:
            pointers.append(at)
            at += length * width
        self.idx.write(little_endian(pointers))
        self.idx.write(little_endian(array.array("q", range(count + 1))))
        self.bin.close()
        self.idx.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.prefix + ".idx")
        self.bin.publish()
        self.idx.publish()

    def discard(self):
        self.bin.discard()
        self.idx.discard()


class Progress:
    """Megabytes of the input files, on a terminal, ten times a second at most."""

    def __init__(self, total):
        self.total, self.last, self.shown = total, 0.0, sys.stderr.isatty()

    def show(self, done, end=False):
        if self.shown and (end or time.monotonic() - self.last > 0.1):
            self.last = time.monotonic()
            sys.stderr.write(f"\r{done / 1e6:.1f} of {self.total / 1e6:.1f} MB read" + ("\n" if end else ""))
            sys.stderr.flush()


def batches_of(paths, arguments, stats, progress):
    """(documents, json_key) of about BATCH_BYTES."""
    before = 0
    for path in paths:
        with Input(path) as source:
            json_key = arguments.json_key if is_jsonl(path) else None
            batch, size = [], 0
            for where, data in documents_of(source, arguments.document_bytes):
                stats["bytes_in"] += len(data)
                batch.append((where, data))
                size += len(data)
                if size >= BATCH_BYTES:
                    yield batch, json_key
                    batch, size = [], 0
                    progress.show(before + source.position())
            if batch:
                yield batch, json_key
        before += os.path.getsize(path)


def encode_all(arguments, eod, wide, writer, progress):
    stats = {"documents": 0, "tokens": 0, "bytes_in": 0}

    def take(future):
        tokens, lengths = future.result()
        writer.add(tokens, lengths)
        stats["documents"] += len(lengths)
        stats["tokens"] += sum(lengths)

    waiting = collections.deque()  # in the order of the input, so many that nobody is idle and memory stays small
    start = (arguments.tokenizer, arguments.special_tokens, eod, wide)
    pool = concurrent.futures.ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("fork"), start_worker,
                                                  start)
    try:
        for batch, json_key in batches_of(arguments.inputs, arguments, stats, progress):
            waiting.append(pool.submit(encode_batch, batch, json_key))
            if len(waiting) > 2 * arguments.workers:
                take(waiting.popleft())
        while waiting:
            take(waiting.popleft())
    except concurrent.futures.process.BrokenProcessPool:
        raise Error("a worker process died", f"{arguments.workers} workers",
                    hint="out of memory? Fewer --workers, or --document-bytes for shorter documents")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return stats


def prepare(arguments):
    if arguments.document_bytes < 0:
        raise Error("value not allowed", "--document-bytes", str(arguments.document_bytes), "0 or more")
    if not 1 <= arguments.workers <= 1024:
        raise Error("value not allowed", "--workers", str(arguments.workers), "1 to 1024")
    for path in arguments.inputs:
        if os.path.isdir(path):
            raise Error("not a file", path, "a folder", "a text, .jsonl or gzip file")
        Input(path).raw.close()  # says what is wrong before the work begins
    tokenizer = load_tokenizer(arguments.tokenizer)
    eod = end_of_document(tokenizer, arguments.tokenizer, arguments.eod)
    size = vocabulary(tokenizer)
    os.makedirs(os.path.dirname(arguments.out) or ".", exist_ok=True)
    writer = IndexedWriter(arguments.out, wide=size >= 65500)
    progress = Progress(sum(os.path.getsize(p) for p in arguments.inputs))
    try:
        stats = encode_all(arguments, eod, size >= 65500, writer, progress)
        if stats["documents"] == 0:
            raise Error("no text in the input", f"{len(arguments.inputs)} files", "0 documents", "at least one")
        writer.finish()
    finally:
        writer.discard()
    progress.show(progress.total, end=True)
    if arguments.json:
        print(json.dumps({"path": arguments.out} | stats | {"vocab_size": size, "eod": eod}))
    else:
        print(f"{arguments.out}.bin and .idx: documents {stats['documents']}, tokens {stats['tokens']}, from "
              f"{stats['bytes_in']} bytes of input; vocabulary {size}, documents end with {eod} "
              f"{json.dumps(tokenizer.id_to_token(eod), ensure_ascii=False)}")


def answer(tokenizer, line):
    try:
        request = json.loads(line)
        if not isinstance(request, dict) or len({"encode", "decode"} & set(request)) != 1:
            return {"error": 'expected {"encode": "text"} or {"decode": [ids]}'}
        if "encode" in request:
            return {"ids": tokenizer.encode(request["encode"], add_special_tokens=request.get("special", False)).ids}
        return {"text": tokenizer.decode(request["decode"], skip_special_tokens=request.get("skip_special", False))}
    except (ValueError, TypeError, OverflowError, RecursionError) as e:
        return {"error": str(e)[:300]}


def serve(arguments):
    tokenizer = load_tokenizer(arguments.tokenizer)
    try:
        eod = end_of_document(tokenizer, arguments.tokenizer, arguments.eod)
    except Error:
        if arguments.eod:
            raise
        eod = None  # nobody needs it to encode and decode
    reply = {"vocab_size": vocabulary(tokenizer), "eod": eod}
    while True:
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            return
        reply = answer(tokenizer, line)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise Error(message, hint="hf_tokenizer.py --help")


def parse(words):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "serve"):
        command = commands.add_parser(name)
        command.add_argument("--tokenizer", required=True, help="tokenizer.json, or a folder that has it")
        command.add_argument("--eod", default="", help="token, or id, that ends a document (tokenizer_config.json's "
                                                       "eos_token)")
        command.add_argument("--json", action="store_true")
    command = commands.choices["prepare"]
    command.add_argument("--out", required=True, metavar="PREFIX")
    command.add_argument("--json-key", default="text")
    command.add_argument("--document-bytes", type=int, default=0)
    command.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    command.add_argument("--special-tokens", action="store_true",
                         help="what the tokenizer itself puts around a text, a beginning-of-text token say")
    command.add_argument("inputs", nargs="+", metavar="FILE")
    return parser.parse_args(words)


def main(words):
    serving = words[:1] == ["serve"]  # our parent says it then
    try:
        arguments = parse(words)
        try:
            import tokenizers  # noqa: F401
        except ImportError as e:
            raise Error("the tokenizers wheel is missing", sys.executable, str(e), "",
                        "./run setup installs it into .venv; DISAGMOE_PYTHON names another interpreter")
        (prepare if arguments.command == "prepare" else serve)(arguments)
        return 0
    except Error as e:
        if not serving:
            print("disagmoe: error: " + e.line(), file=sys.stderr)
        if serving or "--json" in words:
            print(json.dumps({"error": e.parts()}))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
