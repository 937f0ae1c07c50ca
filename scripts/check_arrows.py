"""Checks that includes between the folders of src/ go along the arrows of docs/architecture.md, and that outside
libraries are seen only where they may be."""
import pathlib
import re
import sys

# Folder: the folders that it may include, besides itself.
ARROWS = {
    "base": [],
    "schedule": ["base"],
    "spec": ["base", "schedule"],
    "cost": ["base", "spec", "schedule", "trace"],
    "trace": ["base"],
    "sim": ["base", "spec", "schedule", "cost", "trace"],
    "plan": ["base", "spec", "schedule", "cost", "sim", "trace"],
    "io": ["base", "spec"],
    "transport": ["base"],
    "layers": ["base", "spec"],
    "runtime": ["base", "schedule", "spec", "trace", "io", "transport", "layers"],
    "cli": ["base", "schedule", "spec", "cost", "sim", "plan", "trace", "io", "transport"],
}
# What the tests of a folder (*_test.cc) may include besides: layers read files of another implementation.
TEST_ARROWS = {"cost": ["sim"], "layers": ["io"]}
# Beginning of an outside header: the folders that may include it.
LIBRARIES = {
    "torch/": ["layers", "runtime"],
    "ATen/": ["layers", "runtime"],
    "c10/": ["layers", "runtime"],
    "ucp/": ["transport"],
    "ucs/": ["transport"],
    "openssl/": ["transport", "io"],
    "toml++/": ["spec"],
    "CLI/": ["cli"],
    "interfaces/highs": ["plan"],
    "zlib.h": ["io"],
    "sentencepiece_processor.h": ["io"],
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def mistakes_of(path, folder):
    allowed = ARROWS[folder] + (TEST_ARROWS.get(folder, []) if path.name.endswith("_test.cc") else [])
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        quoted, header = match.group(1) == '"', match.group(2)
        target = header.split("/")[0]
        if quoted and "/" not in header:
            yield f"{path}:{number}: \"{header}\" without its folder"
        elif quoted and target != folder and target not in allowed:
            yield f"{path}:{number}: {folder} may not include {target} (only {', '.join(allowed) or 'nothing'})"
        for library, folders in LIBRARIES.items():
            if header.startswith(library) and folder not in folders:
                yield f"{path}:{number}: <{header}> belongs in {', '.join(folders)} only"


def main():
    source = pathlib.Path(__file__).resolve().parent.parent / "src"
    mistakes = []
    count = 0
    for folder in sorted(p for p in source.iterdir() if p.is_dir()):
        if folder.name not in ARROWS:
            mistakes.append(f"{folder}: a new folder has no arrows yet in {__file__}")
            continue
        for path in sorted([*folder.rglob("*.h"), *folder.rglob("*.cc")]):
            count += 1
            mistakes += mistakes_of(path, folder.name)
    print("\n".join(mistakes) if mistakes else f"arrows: {count} files, all along the arrows")
    sys.exit(1 if mistakes else 0)


if __name__ == "__main__":
    main()
