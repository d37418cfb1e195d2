"""The command `spo init`: writes a configuration for a data set, with comments on what was found and guessed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from common.answers import answer_text, is_missing
from common.checks.machine import read_machine
from common.config import Config, parse_config
from common.config.data import FILES, KNOWN_SETS
from common.errors import UserError, one_line

ROWS = 2000  # rows that are examined
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "messages", "input", "text")
ANSWERS = (
    "answer", "ground_truth", "reward_model.ground_truth", "solution", "target", "label", "expected", "output",
    "response", "completion",
)  # fmt: skip
TESTS = ("tests", "test_cases", "unit_tests", "input_output", "test_list", "test")
HELDOUT = ("heldout", "test", "validation", "valid", "val", "dev", "eval")  # names of files beside the data
NUMBER = re.compile(r"[-+$€£]?\s*\d[\d,. ]*(?:/\d+)?\s*%?")
MATHS = ("\\boxed", "\\frac", "\\sqrt", "$", "^")
SHORT = 64  # characters of an answer that a model may be expected to write exactly
MARK = "####"
MODEL = "Qwen/Qwen3-0.6B"  # named if none is given
BUDGETS = (65_536, 32_768, 16_384, 8_192)  # values of learner.token_budget, from the largest


def init(
    data: Annotated[str, typer.Argument(metavar="DATA", help="*.jsonl, *.parquet, a dataset, or a known set.")],
    model: Annotated[
        str | None, typer.Option(metavar="PATH", help="Model folder or name; its tokenizer measures the lengths.")
    ] = None,
    output: Annotated[Path, typer.Option(help="The file to write; it must not exist.")] = Path("run.yaml"),
) -> None:
    """Look at a data set and write a configuration for it, with comments on what was found and what was guessed.

    - `spo init maths.jsonl --model Qwen/Qwen3-0.6B`
    - `spo init gsm8k --model models/qwen3 --output gsm8k.yaml`
    """
    if output.exists():
        raise UserError(f"--output {output} exists already; name a new file")
    text = configuration(data, model)
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None
    typer.echo(f"{output} is written; read its comments, then: spo data check {output} && spo run {output}")


def configuration(data: str, model: str | None) -> str:
    """The text of a configuration for a data set.

    Raises `UserError` if the data cannot be read or have no prompts, or the model's tokenizer cannot be loaded.
    """
    rows, columns = _look_at(data)
    prompt, answer, tests = _columns(data, rows, columns)
    answers = [value for row in rows if answer and not is_missing(value := _value(row, answer))]
    reward, why = guess_reward(data, answers, answer, tests)
    own = reward.pop("data", {})
    if data not in KNOWN_SETS:
        own = {"prompt_column": prompt, "answer_column": answer if answers else None, **own}
    heldout = _heldout(data)
    paths = {"train": data} | ({"heldout": heldout} if heldout else {})
    tree = {"model": {"path": model or MODEL}, "data": {**paths, **own}, **reward}
    lengths = _lengths(parse_config(tree), model, answers)
    parts = [
        f"# Written by `spo init {data}`. `spo config --explain KEY` says what a key means.",
        f"# Columns of the first {len(rows):,} rows: {one_line(', '.join(columns))}.",
        _section("model", {"path": tree["model"]["path"], **lengths["model"]}, "" if model else
                 f"# No model was given (--model): {MODEL} is an example."),
        _section("data", {**tree["data"], **lengths["data"]}, "\n".join(filter(None, [
            lengths["about"], "" if heldout else "# Add heldout: FILE, to evaluate on it while the run trains."]))),
        _section("episode", {**tree["episode"], **lengths["episode"]}, f"# {why}"),
    ]  # fmt: skip
    tree = yaml.safe_load("\n".join(parts))
    learner, about = _memory(parse_config(tree))
    parts += [_section("sampler", {"batch_size": 128}), _section("learner", learner, about)]
    name = re.sub(r"[^\w.-]+", "-", Path(data).stem) or "run"
    parts += [_section("run", {"name": name, "experiment": name, "steps": 200})]
    text = "\n".join(parts) + "\n"
    parse_config(yaml.safe_load(text))  # a last check: what is written must be a valid configuration
    return text


def guess_reward(
    data: str, answers: Sequence[Any], answer: str | None, tests: str | None
) -> tuple[dict[str, dict[str, Any]], str]:
    """The sections that set the built-in reward that fits the answers, and what it was guessed from."""
    exact, maths = {"episode": {"reward": "exact"}}, {"episode": {"reward": "math"}}
    if data.startswith("reasoning_gym:"):
        return {"episode": {"reward": "reasoning_gym"}}, "reward: the family's own verifier."
    if tests is not None:
        why = f"reward: guessed from the column {tests!r}, which holds tests that a program must pass."
        return {"episode": {"reward": "code", "reward_options": {"code": {"tests": tests}}}}, why
    if not answers:
        why = (
            "reward: NAME ONE. The rows have no answers to compare with, and `length` is only a placeholder: it\n"
            "# rewards short responses. docs/rewards.md has the others, docs/extending.md shows your own."
        )
        return {"episode": {"reward": "length"}}, why
    texts, seen = [answer_text(value).strip() for value in answers], f"the {len(answers):,} values of {answer!r}"
    if _most(MARK in text for text in texts) and data not in KNOWN_SETS:
        why = f"reward: guessed from {seen}, solutions that end with {MARK} and a result: compared as mathematics."
        return {"data": {"answer_after": MARK}, **maths}, why
    if _most(NUMBER.fullmatch(text) is not None for text in texts) or data in KNOWN_SETS:
        return maths, f"reward: guessed from {seen}, numbers: compared as mathematics."
    if _most(any(sign in text for sign in MATHS) for text in texts):
        return maths, f"reward: guessed from {seen}, which hold formulas: compared as mathematics."
    if _most(len(text) <= SHORT for text in texts):
        kinds = len(set(texts))
        what = f"{kinds} choices" if kinds <= 26 and kinds * 4 <= len(texts) else "short texts"
        return exact, (
            f"reward: guessed from {seen}, {what}: the last turn must be the answer alone, so the prompt should say so."
        )
    return exact, (
        f"reward: DOUBTFUL. {seen[0].upper()}{seen[1:]} are long texts, and `exact` wants them word for word.\n"
        "# A judge or a function of your own would compare their meaning: docs/rewards.md, docs/extending.md."
    )


def _most(are: Iterator[bool]) -> bool:
    values = [*are]
    return sum(values) >= 0.9 * len(values)


def _look_at(data: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The first rows that can be read, and their columns; keys of mappings within them as `column.key`."""
    from sampler.prompts.row import BadRow
    from sampler.prompts.rows import open_source  # imports pyarrow, which not every role has

    (source,) = parse_config({"model": {"path": MODEL}, "data": {"train": data}}).data.sources("train")
    rows = [row for row in islice(open_source(source), ROWS) if not isinstance(row, BadRow)]
    if not rows:
        raise UserError(f"{data} has no row that can be read; `spo data check {data}` says why")
    columns = dict.fromkeys(name for row in rows for name in row)
    values = (item for row in rows for item in row.items())
    inner = dict.fromkeys(f"{name}.{key}" for name, value in values if isinstance(value, dict) for key in value)
    return rows, [*columns, *inner]


def _columns(
    data: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]
) -> tuple[str, str | None, str | None]:
    """The columns of prompts, of answers and of tests."""
    from generator.rewards.code.plans import read_tests

    def are_tests(name: str) -> bool:
        try:
            read_tests(_value(rows[0], name))
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        return True

    if data in KNOWN_SETS:
        return KNOWN_SETS[data].prompt_column, KNOWN_SETS[data].answer_column, None
    # Reversed: of names that differ only in case, the first column wins.
    lower = {name.casefold(): name for name in reversed(columns)}
    prompt = next((lower[name] for name in PROMPTS if name in lower), None)
    if prompt is None:
        raise UserError(
            f"{data} has no column with a known name of prompts ({', '.join(PROMPTS)}); it has "
            f"{one_line(', '.join(columns))}: rename one, or write data.prompt_column yourself"
        )
    tests = next((lower[name] for name in (*TESTS, *ANSWERS) if name in lower and are_tests(lower[name])), None)
    answer = next((lower[name] for name in ANSWERS if name in lower and lower[name] not in (prompt, tests)), None)
    return prompt, answer, tests


def _value(row: Mapping[str, Any], column: str) -> Any:
    from sampler.prompts.prompt_set import column_value

    try:
        return column_value(dict(row), column)
    except (KeyError, ValueError, TypeError):
        return None


def _heldout(data: str) -> str | None:
    """A file of the same kind beside the data whose name says that it is held out, or the known set itself."""
    path = Path(data)
    if data in KNOWN_SETS and KNOWN_SETS[data].train_split != KNOWN_SETS[data].heldout_split:
        return data
    names = {path.with_name(one) for name in HELDOUT for one in (path.name.replace("train", name), name + path.suffix)}
    return next((str(one) for one in sorted(names) if path.suffix in FILES and one != path and one.is_file()), None)


def _lengths(config: Config, model: str | None, answers: Sequence[Any]) -> dict[str, Any]:
    """Limits for prompts and responses, by section, and the comment about them."""
    from generator.chat.token_text import load_tokenizer
    from launcher.checks.rows import PromptEncoder, report_source

    (source,) = config.data.sources("train")
    if model is None:
        encode, count, unit = None, lambda text: len(text) // 3, "tokens, estimated as a third of the characters"
    else:
        tokenizer = load_tokenizer(model)
        encode, unit = PromptEncoder(config, source, tokenizer), f"tokens of {model}"
        count = lambda text: len(tokenizer.encode(text, add_special_tokens=False))  # noqa: E731
    report = report_source(source, config.data.max_prompt_tokens, encode, lambda rows, *_: rows, examples=0)
    if report.characters is None:
        raise UserError(f"{source.key}: {report.problem}")
    longest = report.tokens.max if report.tokens else report.characters.max // 3 + 64
    answer = max((count(answer_text(value)) for value in answers), default=0)
    prompts, responses = _rounded(longest), _rounded(max(1024, 2 * answer))
    about = f"# The longest of {report.usable:,} prompts has {longest:,}, the longest answer {answer:,} {unit}."
    return {
        "data": {"max_prompt_tokens": prompts},
        "episode": {"max_response_tokens": responses},
        "model": {"max_model_len": prompts + responses},
        "about": about,
    }


def _rounded(tokens: int) -> int:
    return -(-tokens // 64) * 64


def _memory(config: Config) -> tuple[dict[str, Any], str]:
    """The learner's settings for this machine's memory, and the comment about them."""
    from launcher.layout.gpus import read_gpus
    from launcher.layout.needs import GB, RESERVED, needs_of

    machine = read_machine()
    gpus = read_gpus(machine.environ)
    # Without a GPU, learner and generator share the memory of the machine.
    memory = min((gpu.total for gpu in gpus), default=machine.memory // 2)
    ranks = max(1, len(gpus) // 2)
    for budget in BUDGETS:
        settings = {"token_budget": budget, "dtype": "bfloat16" if gpus else "float32"}
        tried = config.model_copy(update={"learner": config.learner.model_copy(update=settings)})
        needs = needs_of(tried)
        if isinstance(needs, str):
            return {"token_budget": BUDGETS[-1]}, f"# token_budget is not measured: {one_line(needs)}."
        peak = needs.rank(ranks).peak
        has_room = peak + (RESERVED if gpus else 0) <= memory
        if has_room:
            break
    each = f"each of the {len(gpus)} GPUs has" if len(gpus) > 1 else "the GPU has"
    where = each if gpus else "half the machine's memory is"
    fits = "" if has_room else ": IT DOES NOT FIT; see docs/gpu.md (Does it fit)"
    about = f"With this token_budget a rank takes {peak / GB:.1f} GB; {where} {memory / GB:.1f} GB{fits}."
    return settings, f"# {about}"


def _section(name: str, keys: Mapping[str, Any], comment: str = "") -> str:
    values = yaml.safe_dump(dict(keys), sort_keys=False, allow_unicode=True, width=100)
    lines = [*comment.splitlines(), *values.splitlines()]
    return f"\n{name}:\n" + "\n".join(f"  {line}" for line in lines)
