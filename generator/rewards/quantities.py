r"""Rewrites numbers as people write them into what math-verify reads: `34.`, `\$18`, `1e3`, `2 1/3`, `15 dollars`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

# Full-width forms of ASCII, common in Chinese and Japanese texts.
NARROW = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)}
MAX_EXPONENT = 15  # of numbers that are written out; a float has no more digits
DECIMAL = r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
NUMBER = re.compile(
    rf"(?P<mixed>-?\d+)\s+(?P<over>\d+)/(?P<under>\d+)|(?P<power>-?\d+(?:\.\d+)?[eE][+-]?\d+)|{DECIMAL}/\d+|{DECIMAL}"
)
CURRENCY = re.compile(r"(-?) ?(?:(?:US)?\\?\$|[€£¥])\s*(?=-?\d[^$]*$)|(?<=\d)()\s*[€£¥]$")
THIN_SPACE = re.compile(r"(?<=\d)\\[,! ](?=\d{3}(?!\d))")
IN_WORDS = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{\s*(-?\\?\$?\d[^{}]*)\}")
# Short names of units. A letter that follows a number without a space is a variable.
SHORT = {
    "m": "meter", "metre": "meter", "mm": "millimeter", "cm": "centimeter", "km": "kilometer", "g": "gram",
    "mg": "milligram", "kg": "kilogram", "l": "liter", "litre": "liter", "ml": "milliliter", "s": "second",
    "h": "hour", "hr": "hour", "min": "minute", "ft": "foot", "feet": "foot", "in": "inch", "inche": "inch",
    "yd": "yard", "mi": "mile", "lb": "pound", "oz": "ounce", "mph": "mile/hour", "kph": "kilometer/hour",
    "usd": "dollar", "eur": "euro",
}  # fmt: skip
_SHORT = "|".join(sorted((name for name in SHORT if len(name) < 3), key=len, reverse=True))
# A number, then words in brackets or \text{}, or a unit with its power.
QUANTITY = re.compile(
    rf"(?P<number>{NUMBER.pattern})\s*(?:\((?P<note>[A-Za-z][A-Za-z -]+)\)|"
    r"(?:\\(?:text|mathrm|mbox)\s*\{\s*)?(?P<unit>[A-Za-z]{3,}\.?(?:(?:\s+|/|\s+/\s+)[A-Za-z]+)*"
    rf"|(?<=[\s{{])(?:{_SHORT})\.?(?:/[A-Za-z]+)?)\s*\}}?"
    r"(?P<degree>\^\{?\d\}?)?)"
)
# Words after a number that make it another number, or no single one.
_WORDS = (
    "and or to by of dozen hundred thousand million billion trillion percent pi sqrt sin cos tan cot "
    "sec csc log exp mod plus minus times choose over half halves third thirds quarter quarters"
)
NO_UNITS = frozenset(_WORDS.split())
ALONE = re.compile(rf"{DECIMAL}(?:/\d+|\\frac\{{\d+\}}\{{\d+\}})?")
SENTENCE = re.compile(
    r"(?:[A-Za-z].*\b(?:is|are|equals)\b|(?:the |final |correct )*answer\b)\s*:?\s*(.+)", re.IGNORECASE | re.DOTALL
)


def plain(text: str) -> tuple[str, str]:
    """An answer as mathematics, and the unit beside its number; any other text unchanged, without a unit.

    A number at the end of a sentence (`The answer is 34.`), or of a computation there, stands for the whole.
    """
    if "####" in text:
        text = text.rpartition("####")[2]
    if sentence := SENTENCE.fullmatch(_tidy(text)):
        written, unit = _quantity(_result(_tidy(sentence[1])))
        if ALONE.fullmatch(written):
            return written, unit
    return _quantity(_tidy(text))


def _quantity(text: str) -> tuple[str, str]:
    if quantity := QUANTITY.fullmatch(text):
        unit = (quantity["unit"] or "").casefold()
        words = f"{unit} {quantity['note'] or ''}".casefold()
        if NO_UNITS.isdisjoint(re.split(r"[^a-z]+", words)):
            return _number(quantity["number"]), _unit(unit) + (quantity["degree"] or "")
    return _number(text), ""


def _unit(text: str) -> str:
    """A unit in a normal form for comparison: that of `40 mph`, `40 miles per hour` and `40 mi/h` is the same."""
    words = [word if word in SHORT else word.removesuffix("s") for word in re.findall(r"[a-z]+|/", text)]
    return "".join("/" if word == "per" else SHORT.get(word, word) for word in words)


def _result(text: str) -> str:
    """The result at the end of a computation without variables; any other text unchanged."""
    formula = re.fullmatch(r"\$([^$]+)\$", text)
    computed, equals, result = (formula[1] if formula else text).rpartition("=")
    return result.strip() if equals and not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", computed)) else text


def _tidy(text: str) -> str:
    text = text.translate(NARROW).replace("{:}", ":").strip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip()
    if words := IN_WORDS.fullmatch(text):
        text = words[1].rstrip()
    return CURRENCY.sub(r"\1", THIN_SPACE.sub("", text))


def _number(text: str) -> str:
    match = NUMBER.fullmatch(text)
    if match is None:
        return text
    if match["mixed"]:
        return rf"{match['mixed']}\frac{{{match['over']}}}{{{match['under']}}}"
    if match["power"]:
        number, power = re.split("[eE]", text)
        try:
            small = abs(Decimal(text).adjusted()) <= MAX_EXPONENT
        except InvalidOperation:  # an exponent of more than 18 digits
            return text
        return format(Decimal(text), "f") if small else rf"{number} \times 10^{{{int(power)}}}"
    return text
