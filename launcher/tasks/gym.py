"""Twelve families of reasoning-gym, each with its own verifier: the model can guess, or work the answer out first.

The initial model guesses nearly always in some families and rarely in others, and some families are harder to learn, so
the families start at very different success rates.
"""

from __future__ import annotations

import json
import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launcher.tasks.task import Choice, Problem, QuickstartTask, Recipe, Turn

DEMONSTRATED = 0.8
ITEMS = 1 << 30  # size of each family's data set
WORK, ANSWER, END = "<think>", "</think><answer>", "</answer>"
GUESS = "<answer>"

Metadata = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A family of tasks.

    Attributes:
        options: options of reasoning-gym for this family.
        initial: share of the answers that the initial model works out.
        work: makes the reasoning before the answer from an item's metadata.
    """

    options: dict[str, Any]
    initial: float
    work: Callable[[Metadata], str]


def _running(expression: str) -> str:
    """Sums or products from left to right: 3+8=11 11-5=6."""
    steps = {"+": operator.add, "-": operator.sub, "*": operator.mul}
    first, *rest = expression.split()
    value, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        before, value = value, steps[sign](value, int(term))
        lines.append(f"{before}{sign}{term}={value}")
    return " ".join(lines)


def _euclid(metadata: Metadata) -> str:
    a, b = sorted(metadata["numbers"], reverse=True)
    lines = []
    while b:
        lines.append(f"{a}%{b}={a % b}")
        a, b = b, a % b
    return " ".join(lines)


def _lcm(metadata: Metadata) -> str:
    a, b = metadata["numbers"]
    common = math.gcd(a, b)
    return f"{common} {a}/{common}={a // common} {a // common}*{b}={metadata['result']}"


def _letters(metadata: Metadata) -> str:
    letter = metadata["target_letter"]
    return " ".join(f"{word}:{word.lower().count(letter)}" for word in metadata["span"])


def _kept(metadata: Metadata) -> str:
    return " ".join(f"{text}{'+' if text in metadata['result'] else '-'}" for text in metadata["original_numbers"])


def _divisions(metadata: Metadata) -> str:
    rest, lines = metadata["number"], []
    for factor in metadata["factors"][:-1]:
        lines.append(f"{rest}={factor}*{rest // factor}")
        rest //= factor
    return " ".join(lines)


def _legs(metadata: Metadata) -> str:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    products = [(count, ANIMALS[animal]) for animal, count in metadata["animals"].items()]
    lines = [f"{count}*{legs}={count * legs}" for count, legs in products]
    return " ".join([*lines, "+".join(str(count * legs) for count, legs in products)])


FAMILIES = {
    "chain_sum": Family(
        {"min_terms": 2, "max_terms": 3, "max_digits": 1}, 0.5, lambda metadata: _running(metadata["expression"])
    ),
    "products": Family(
        {"min_terms": 2, "max_terms": 3, "max_digits": 1}, 0.8, lambda metadata: _running(metadata["expression"])
    ),
    "gcd": Family({"max_value": 30}, 0.3, _euclid),
    "lcm": Family({"max_value": 20}, 0.2, _lcm),
    "count_bits": Family({"max_n": 255}, 0.2, lambda metadata: metadata["binary"]),
    "letter_counting": Family({"min_words": 1, "max_words": 2}, 0.9, _letters),
    "spell_backward": Family(
        {"min_word_len": 3, "max_word_len": 4}, 0.95, lambda metadata: "-".join(reversed(metadata["word"]))
    ),
    "number_sorting": Family(
        {"min_numbers": 2, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 99},
        0.6,
        lambda metadata: " ".join(text.removesuffix(".0") for text in metadata["sorted_numbers"]),
    ),
    "number_filtering": Family(
        {"min_numbers": 2, "max_numbers": 3, "max_decimals": 0, "min_value": 0, "max_value": 99}, 0.4, _kept
    ),
    "fraction_simplification": Family(
        {"max_value": 9, "max_factor": 9, "styles": ["plain"]},
        0.2,
        lambda metadata: str(metadata["reduction_factor"]),
    ),
    "prime_factorization": Family({"max_value": 120}, 0.15, _divisions),
    "leg_counting": Family({"min_animals": 1, "max_animals": 2, "max_instances": 9}, 0.7, _legs),
}
# Texts that recur in the questions; each is one token.
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    "Find the Least Common Multiple (LCM) of these numbers: ",
    "How many 1 bits are there in the binary representation of the number ",
    "How many times does the letter ",
    " appear in the text: ",
    "Spell this word backward (example: sun -> nus): ",
    "Sort these numbers in ",
    "ascending order: ",
    "descending order: ",
    "\nPlease follow the instruction below:\n## 1. Let all your answers be a list of numbers. Instead of "
    "reporting your answer as -69, -13, 1, 7, 11, 43, 59, 61, use ['-69', '-13', '1', '7', '11', '43', '59', '61'] "
    "instead\n## 2. Convert all numbers in the square brackets as strings. For example, ['-69', '-13', '1', '7', '11', "
    "'43', '59', '61']\n",
    "Keep all numbers ",
    "Remove all numbers ",
    "larger than ",
    "smaller than ",
    " in this list: ",
    "\nReturn the new list in the same format.",
    "Simplify the fraction ",
    " to its lowest terms. Give only the simplified fraction as your final answer.",
    "Find the prime factorization of ",
    ". Write the factors separated by × (Example: for 12 the answer would be: 2 × 2 × 3)",
    "Your task is to count how many legs there are in total when given a list of animals.\n\nNow, how many legs are "
    "there in total if you have ",
    "['",
    "', '",
    "']",
    " × ",
)


def problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems of all families equally often; a guess is the answer to another problem of the family."""
    # Imported here, since most of the command line works without reasoning-gym.
    from sampler.prompts.gym_rows import PREFIX, GymRows

    items = {
        name: GymRows(PREFIX + name, "train", {**family.options, "size": ITEMS}) for name, family in FAMILIES.items()
    }
    names = list(FAMILIES)
    last: dict[str, str] = {}
    while True:
        name = rng.choice(names)
        row = items[name][rng.randrange(ITEMS)]
        answer = row["answer"]
        if name in last:
            work = FAMILIES[name].work(json.loads(row["entry"])["metadata"])
            columns = {"family": name, "entry": row["entry"]}
            yield Problem(row["prompt"], answer, columns, (work, last[name]))
        last[name] = answer


def demonstrate(problem: Problem, rng: random.Random) -> list[Turn]:
    """Either work the answer out, or guess."""
    work, guess = problem.solution
    initial = FAMILIES[problem.columns["family"]].initial
    worked, weight = Choice(DEMONSTRATED, initial).draw(rng)
    text = f"{WORK}{work}{ANSWER}{problem.answer}{END}" if worked else f"{GUESS}{guess}{END}"
    return [Turn(text, weight=weight)]


TASK = QuickstartTask(
    "gym",
    "to work out twelve kinds of tasks of reasoning-gym instead of guessing",
    problems,
    demonstrate,
    extra_tokens=(WORK, ANSWER, GUESS, END, *PHRASES),
    recipe=Recipe(steps=400),
)
