"""The parts of examples/math_agent that need no agent framework: data, calculator, reward."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import sums

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "math_agent"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"math_agent_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


calculate = loaded("calculation").calculate
rewards = loaded("reward")
prepare = loaded("prepare_gsm8k")


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        ("10-4-3", "3"),
        ("24/4/2", "3"),
        ("-(3-5)*+2", "4"),
        (" 1,234,567 * 2 ", "2469134"),
        ("0.1+0.2", "0.3"),
        (".5*4", "2"),
        ("9 × 64 ÷ 8 − 2", "70"),
        ("1/3", "0.333333333333"),
        ("-1/8", "-0.125"),
        ("2/3*3", "2"),
        ("1/" + "1" + "0" * 30, "0." + "0" * 29 + "1"),
        ("1/0", "error: division by zero"),
        ("3/(2-2)", "error: division by zero"),
        ("", "error: a number is missing at the end"),
        ("2+", "error: a number is missing at the end"),
        ("2+*3", "error: a number is missing before '*'"),
        ("()", "error: a number is missing before ')'"),
        ("(2+3", "error: a parenthesis is not closed"),
        ("2+3)", "error: nothing was expected before ')'"),
        ("2(3)", "error: nothing was expected before '('"),
        ("1,23", "error: ',' is not known; there are numbers, + - * / and ( )"),
        ("1.2.3", "error: nothing was expected before '.3'"),
        ("__import__('os')", "error: '_' is not known; there are numbers, + - * / and ( )"),
        ("9**9**9", "error: a number is missing before '*'"),
        ("9^9", "error: '^' is not known; there are numbers, + - * / and ( )"),
        ("١+١", "error: '١' is not known; there are numbers, + - * / and ( )"),
        ("1" * 201, "error: the expression is longer than 200 characters"),
        ("(" * 100, "error: more than 20 parentheses or signs within one another"),
        ("-" * 100 + "1", "error: more than 20 parentheses or signs within one another"),
        ("(" * 19 + "1" + ")" * 19, "1"),
    ],
)
def test_the_calculator(expression: str, value: str) -> None:
    assert calculate(expression) == value


@given(sums())
def test_the_calculator_calculates_as_python_does(expression: str) -> None:
    try:
        exact = eval(re.sub(r"(\d+)", r"Fraction(\1)", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        assert calculate(expression) == "error: division by zero"
    else:
        value = Fraction(calculate(expression))
        assert value == exact if exact.denominator == 1 else abs(value / exact - 1) < 1e-11


@given(st.text(max_size=20) | st.text("019.,+-*/() ", max_size=210))
def test_the_calculator_always_answers_shortly(expression: str) -> None:
    answer = calculate(expression)
    assert answer.startswith("error: ") or Fraction(answer) is not None
    assert len(answer) < 450


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("The sum is 40 + 2.\n#### 42\n", "42"),
        ("####42", "42"),
        ("#### $1,250.00", "1250"),
        ("#### -$3.50 per day", "-3.5"),
        ("#### $-7", "-7"),
        ("#### −7", "-7"),
        ("#### –7", "-7"),
        ("#### **42**.", "42"),
        (r"#### \boxed{42}", "42"),
        ("#### 0.5", ".50"),
        ("#### 007", "7"),
        ("#### 1,000,000", "1000000"),
        ("#### 41\nNo:\n#### 42", "42"),
        ("#### 42\nThat is 6 * 7.", "42"),
        ("####\n\n42", "42"),
    ],
)
def test_an_answer_that_is_read(text: str, number: str) -> None:
    assert rewards.reward(text, number) == 1.0
    assert rewards.reward(text, "43") == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "The answer is 42.",
        "####",
        "#### none",
        "#### 41 or 42",
        "#### 42 42",
        "#### 1,23",
        "#### 4.2.4",
        "####\nis\n42",
        "#### 42\n####",
        "#### ٤٢",
    ],
)
def test_an_answer_that_is_none(text: str) -> None:
    assert rewards.final_answer(text) is None
    assert rewards.reward(text, 42) == 0.0


@given(st.integers(-(10**9), 10**9))
def test_any_whole_number_is_worth_its_own_answer_alone(number: int) -> None:
    for spelled in (f"{number}", f"{number:,}", f"{number}.0", f"${number:,}.00"):
        assert rewards.reward(f"#### {spelled}", str(number)) == 1.0
        assert rewards.reward(f"#### {spelled}", str(number + 1)) == 0.0


@pytest.mark.parametrize("answer", ["", "none", None, "1 or 2"])
def test_a_payload_without_a_number_is_told(answer: Any) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"the payload's answer {answer!r} is no number")
    ):
        rewards.reward("#### 1", answer)


def problem(answer: str = "1 + 1 = <<1+1=2>>2\n#### 2", **fields: Any) -> bytes:
    return json.dumps({"question": "How many …?", "answer": answer, **fields}).encode()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", EXAMPLE / "prepare_gsm8k.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_rows_of_gsm8k(tmp_path: Path) -> None:
    source, output = tmp_path / "train.jsonl", tmp_path / "rows.jsonl"
    source.write_bytes(b"\r\n".join([problem(), b"", problem("#### -1,234,567.5 "), b""]))
    ran = run(source, output)
    assert (ran.returncode, ran.stdout) == (0, f"2 rows in {output}\n"), ran.stderr
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {
            "prompt": "How many …?",
            "metadata": {"payload": {"prompt": "How many …?", "answer": answer}},
        }
        for answer in ("2", "-1234567.5")
    ]
    assert sorted(tmp_path.iterdir()) == [output, source]


def test_wrong_lines_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    source, output = tmp_path / "train.jsonl", tmp_path / "rows.jsonl"
    output.write_text("of before\n")
    wrong = {
        b"{": "no JSON: ",
        b"[]": "no JSON object",
        problem(question=" "): '"question" is missing, or no text',
        b'{"question": "Why?"}': '"answer" is missing, or no text',
        problem("2"): 'there is no #### in "answer"',
        problem("#### two"): "behind #### in \"answer\" is no number, but 'two'",
        problem("#### 2 3"): "behind #### in \"answer\" is no number, but '2 3'",
        b'{"question": "\xff"}': "not UTF-8",
    }
    source.write_bytes(b"\n".join([problem(), *wrong, problem()]))
    ran = run(source, output)
    assert (ran.returncode, ran.stdout) == (1, "")
    *lines, last = ran.stderr.splitlines()
    assert last == "nothing was written"
    for number, (line, said) in enumerate(zip(lines, wrong.values(), strict=True), start=2):
        assert line.startswith(f"{source}:{number}: {said}")
    assert output.read_text() == "of before\n"


def test_of_many_wrong_lines_the_first_are_named(tmp_path: Path) -> None:
    with pytest.raises(prepare.Wrong) as raised:
        prepare.rows(b"{}\n" * 30, "train.jsonl")
    lines = str(raised.value).splitlines()
    assert lines[9].startswith("train.jsonl:10: ")
    assert lines[10:] == ["… 20 more wrong lines"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["empty.jsonl", "rows.jsonl"], 1, "empty.jsonl holds no problem"),
        (["none.jsonl", "rows.jsonl"], 1, "none.jsonl: No such file or directory"),
        (["problems.jsonl", "none/rows.jsonl"], 1, "none/rows.jsonl.part: No such file"),
        (["rows.jsonl"], 2, "required"),
        (["--download", "dev", "rows.jsonl"], 2, "invalid choice"),
        (["--download", "test", "problems.jsonl", "rows.jsonl"], 2, "not allowed with"),
    ],
)
def test_wrong_use(
    arguments: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    Path("problems.jsonl").write_bytes(problem())
    ran = run(*arguments)
    assert ran.returncode == status
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not Path("rows.jsonl").exists()


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `--download` looks for "test"."""
    path = tmp_path / "test.jsonl"
    path.write_bytes(problem())
    digest = hashlib.sha256(problem()).hexdigest()
    monkeypatch.setitem(prepare.SHA256, "test", digest)
    monkeypatch.setattr(prepare, "ADDRESS", f"{tmp_path.as_uri()}/{{}}.jsonl")
    return path


def test_what_is_published_is_fetched(published: Path, tmp_path: Path) -> None:
    prepare.main(["--download", "test", str(tmp_path / "rows.jsonl")])
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 1


def test_what_is_not_the_published_file_is_refused(published: Path, tmp_path: Path) -> None:
    published.write_bytes(problem() + b"\n")
    with pytest.raises(SystemExit, match="is not the file that was published"):
        prepare.main(["--download", "test", str(tmp_path / "rows.jsonl")])
    published.unlink()
    with pytest.raises(SystemExit, match="cannot be read"):
        prepare.main(["--download", "test", str(tmp_path / "rows.jsonl")])


def test_the_problems_of_the_example_are_right() -> None:
    made = prepare.rows((EXAMPLE / "problems.jsonl").read_bytes(), "problems.jsonl")
    lines = (EXAMPLE / "problems.jsonl").read_text().splitlines()
    for row, line in zip(made, lines, strict=True):
        solution = json.loads(line)["answer"]
        assert rewards.reward(solution, row["metadata"]["payload"]["answer"]) == 1.0
        for expression, value in re.findall(r"<<(.+?)=(.+?)>>", solution):
            assert calculate(expression) == value


def test_the_image_has_the_versions_that_are_tested() -> None:
    pinned: dict[str, str] = {}
    for name in ("dev.txt", "clients.txt"):
        lines = (ROOT / "constraints" / name).read_text().splitlines()
        pinned |= dict(line.split("==") for line in lines)
    for requirement in (EXAMPLE / "requirements.txt").read_text().splitlines():
        name, version = re.sub(r"\[.*\]", "", requirement).split("==")
        assert pinned[name] == version


def test_the_image_has_what_the_agent_imports() -> None:
    copied = re.findall(r"^COPY (.*) \./$", (EXAMPLE / "Dockerfile").read_text(), re.MULTILINE)
    imported = re.findall(r"^from (\w+) import", (EXAMPLE / "agent.py").read_text(), re.MULTILINE)
    beside = {f"{name}.py" for name in imported} & {path.name for path in EXAMPLE.glob("*.py")}
    assert {name for files in copied for name in files.split()} == beside | {"agent.py"}
