"""Runs the command-line transcripts of a folder and compares what is printed, word for word.

    transcripts.py DISAGMOE TESTDATA [--update]

A transcript is text: "#" begins a comment, a line "$ COMMAND" is run by bash, what follows is what it prints (stdout and stderr together),
then "[exit N]" where N is not 0. Each transcript runs in a new folder with a copy of TESTDATA/files and of the program,
beside a stand-in for disagmoe-worker that prints how it was called. --update writes what was printed into the
transcripts: read the difference before you commit it.
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

WORKER = """#!/bin/bash
echo "worker called: $*"
echo "UCX_MEM_EVENTS=$UCX_MEM_EVENTS OMP_WAIT_POLICY=$OMP_WAIT_POLICY"
"""
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC",
          "UCX_", "OMP_",
          "DISAGMOE_")


def environment(program_folder):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OTHERS)}
    kept["PATH"] = f"{program_folder}:{kept.get('PATH', '/usr/bin:/bin')}"
    kept["LC_ALL"] = "C"
    return kept


def replay(program, transcript, files):
    """The transcript as it comes out now."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        work = folder / "work"
        shutil.copytree(files, work)
        (folder / "bin").mkdir()
        shutil.copy(program, folder / "bin/disagmoe")
        worker = folder / "bin/disagmoe-worker"
        worker.write_text(WORKER)
        worker.chmod(0o755)
        lines = []
        for line in transcript.read_text().splitlines():
            if line.startswith("#"):
                lines.append(line)
            if not line.startswith("$ "):
                continue
            command = line[2:]
            run = subprocess.run(["bash", "-c", command], cwd=work, env=environment(folder / "bin"), timeout=60,
                                 stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            lines += ["$ " + command, *run.stdout.decode(errors="replace").replace(name, "FOLDER").splitlines()]
            if run.returncode != 0:
                lines.append(f"[exit {run.returncode}]")
        return "\n".join(lines) + "\n"


def first_difference(got, expected):
    got, expected = got.splitlines(), expected.splitlines()
    for number in range(max(len(got), len(expected))):
        a = got[number] if number < len(got) else "(nothing)"
        b = expected[number] if number < len(expected) else "(nothing)"
        if a != b:
            return f"line {number + 1}:\n  got      {a}\n  expected {b}"
    return ""


def main():
    program, testdata, update = sys.argv[1], pathlib.Path(sys.argv[2]), "--update" in sys.argv
    failed = 0
    transcripts = sorted(testdata.glob("*.txt"))
    if not transcripts:
        sys.exit(f"no transcripts in {testdata}")
    for transcript in transcripts:
        got = replay(program, transcript, testdata / "files")
        difference = first_difference(got, transcript.read_text())
        if update:
            transcript.write_text(got)
        elif difference:
            failed += 1
            print(f"{transcript.name}, {difference}")
    print(f"{len(transcripts) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
