"""Makes training rows of GSM8K: python prepare_gsm8k.py train.jsonl rows.jsonl

The input is GSM8K's own file, one {"question", "answer"} a line, or with --download the file as it
is published. Each line of the output is a row for slime and for the agent beside this file.
"""

import argparse
import hashlib
import json
import re
import urllib.request
from pathlib import Path

ADDRESS = (
    "https://raw.githubusercontent.com/openai/grade-school-math/"
    "3101c7d5072418e28b9008a6636bde82a006892c/grade_school_math/data/{}.jsonl"
)
SHA256 = {
    "train": "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
    "test": "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
}
LARGEST = 64 * 2**20  # bytes of a download; the files have less than 5 MB
TIMEOUT = 60  # seconds without an answer
SHOWN = 10  # wrong lines


class Wrong(Exception):
    """What is wrong, for the reader."""


def row(line):
    """The row that a line of GSM8K makes. Raises Wrong."""
    try:
        problem = json.loads(line)
    except ValueError as error:
        raise Wrong(f"no JSON: {error}") from None
    if not isinstance(problem, dict):
        raise Wrong("no JSON object")
    question, solution = problem.get("question"), problem.get("answer")
    if not isinstance(question, str) or not question.strip():
        raise Wrong('"question" is missing, or no text')
    if not isinstance(solution, str):
        raise Wrong('"answer" is missing, or no text')
    _, mark, behind = solution.rpartition("####")
    answer = behind.strip().replace(",", "")
    if not mark:
        raise Wrong('there is no #### in "answer"')
    if not re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", answer):
        raise Wrong(f'behind #### in "answer" is no number, but {behind.strip()[:40]!r}')
    return {"prompt": question, "metadata": {"payload": {"prompt": question, "answer": answer}}}


def rows(data, name):
    """The rows of a file's bytes; empty lines are skipped. Raises Wrong, which names the lines."""
    made, wrong = [], []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            try:
                made.append(row(line.decode()))
            except UnicodeDecodeError:
                wrong.append(f"{name}:{number}: not UTF-8")
            except Wrong as error:
                wrong.append(f"{name}:{number}: {error}")
    if len(wrong) > SHOWN:
        wrong[SHOWN:] = [f"… {len(wrong) - SHOWN} more wrong lines"]
    if wrong:
        raise Wrong("\n".join(wrong))
    if not made:
        raise Wrong(f"{name} holds no problem")
    return made


def download(part):
    """The published file's bytes, checked. Raises Wrong."""
    url = ADDRESS.format(part)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as reply:
            data = reply.read(LARGEST + 1)
    except OSError as error:
        raise Wrong(f"{url} cannot be read: {error}") from None
    if hashlib.sha256(data).hexdigest() != SHA256[part]:
        raise Wrong(f"{url} is not the file that was published: its SHA-256 differs")
    return data


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Make training rows of GSM8K.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("source", nargs="?", type=Path, help="GSM8K's JSONL file")
    source.add_argument("--download", choices=SHA256, help="fetch this part of GSM8K")
    parser.add_argument("output", type=Path, help="the JSONL file to write")
    options = parser.parse_args(arguments)
    try:
        if options.download:
            made = rows(download(options.download), f"{options.download}.jsonl")
        else:
            made = rows(options.source.read_bytes(), options.source)
        # Whole or not at all: a run may be reading the old file.
        draft = options.output.with_name(f"{options.output.name}.part")
        draft.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in made), "utf-8")
        draft.replace(options.output)
    except OSError as error:
        raise SystemExit(f"{error.filename}: {error.strerror}") from None
    except Wrong as error:
        raise SystemExit(f"{error}\nnothing was written") from None
    print(f"{len(made)} rows in {options.output}")


if __name__ == "__main__":
    main()
