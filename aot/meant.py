"""What a person may have meant by a target or vendor that there is not: by a product's name, another name of
the vendor, or its spelling. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from . import targets

_CLOSE = 0.75
_MOST = 4
# Fewer letters stand within too many names.
_SHORTEST_PART = 4

_Target = tuple[str, str]


def target(text: str) -> str:
    """`; did you mean nvidia:sm_90?` for a target that is none, or an empty text."""
    return _question(_targets(text))


def vendor(text: str) -> str:
    """`; did you mean nvidia?` for a vendor that is none, or an empty text."""
    return _question(_vendors(text))


def _question(found: Sequence[str]) -> str:
    if not found or len(found) > _MOST:
        return ""
    *first, last = found
    return f"; did you mean {', '.join(first)}{' or ' if first else ''}{last}?"


def _targets(text: str) -> list[str]:
    head, colon, tail = text.partition(":")
    vendors = _vendors(head)
    if not colon and _letters(head) in _names():
        return vendors
    every = [(name, arch) for name in targets.names() for arch in targets.load(name).ARCHS]
    own = [each for each in every if each[0] in vendors] if colon else []
    words = _without_vendor(_letters(tail if colon else text))
    # Chips of two vendors may share an arch's name, and no product's: a vendor that was named counts for it.
    found = _by_product(words, own) or _by_arch(words, own) or _by_product(words, every)
    if not found and not own:
        found = _by_arch(words, every)
    return [f"{name}:{arch}" for name, arch in found] or [each for each in vendors if each != head]


def _vendors(text: str) -> list[str]:
    known, letters = _names(), _letters(text)
    close = [letters] if letters in known else difflib.get_close_matches(letters, known, cutoff=_CLOSE)
    return list(dict.fromkeys(known[each] for each in close))


def _names() -> dict[str, str]:
    """The vendor by each of its names."""
    return {
        _letters(each): name
        for name in targets.names()
        for each in (name, *targets.load(name).ALIASES)
    }


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _without_vendor(word: str) -> list[str]:
    """The word, and what is left of it behind a vendor's name."""
    return [word, *(word[len(name) :] for name in _names() if word.startswith(name) and word != name)]


def _by_product(words: Iterable[str], among: Sequence[_Target]) -> list[_Target]:
    """Those that have a product of that name: its whole name (and whatever follows), else a part of it."""
    scores: dict[_Target, int] = {}
    for name, arch in among:
        for product in map(_letters, targets.load(name).CHIPS.get(arch, ())):
            for word in words:
                # What follows a number must not make it another one: an L400 is no L4. And nothing may follow
                # where the arch is the chip's own name.
                begins = re.match(rf"{product}{'$' if _letters(arch) in product else '(?![0-9])'}", word)
                part = len(word) >= _SHORTEST_PART and word in product
                score = 1000 + len(product) if begins else len(word) if part else 0
                scores[name, arch] = max(scores.get((name, arch), 0), score)
    best = max(scores.values(), default=0)
    return [each for each, score in scores.items() if score == best and best]


def _by_arch(words: Iterable[str], among: Sequence[_Target]) -> list[_Target]:
    """Those whose arch is spelled so, or nearly so with the same numbers: another number is another chip."""
    archs = {_letters(arch): (name, arch) for name, arch in among}
    for word in words:
        if word in archs:
            return [archs[word]]
        alike = [arch for arch in archs if re.findall(r"\d+", arch) == re.findall(r"\d+", word)]
        # Where an arch is a chip's own name, a letter more is another chip: 910B2C is no 910B2.
        alike = [arch for arch in alike if not (arch[0].isdigit() and re.search(f"{arch}[a-z]", word))]
        close = difflib.get_close_matches(word, alike, cutoff=_CLOSE)
        if close:
            return [archs[each] for each in close]
    return []
