"""Rules of the English that style.py checks."""

from __future__ import annotations

import re
from dataclasses import dataclass

START = r"(?:(?:^|\| )[-#|>* ]*|(?<=[.!?:;] ))"
"""Begin of a sentence, a paragraph, a cell, an item or a heading."""


@dataclass(frozen=True)
class Rule:
    """Words that the house style replaces.

    Args:
        words: regular expression for a text with one line for each paragraph.
        write: what to write instead.
        allowed: regular expression for the words before and after a match that make it right.
        within: regular expression for the beginning of the paths that have the rule.
    """

    words: str
    write: str
    allowed: str = ""
    within: str = ""


PYTHON = r"pyvelo|scripts|tests|docs|README|CONTRIBUTING"
COULD_BE = r"(is|are|was|were|be|been|being)"

RULES = [
    Rule(
        r"(?<!sers )(?<!ople )(?<!user )\b[Ww]ho(ever|m|mever)?\b(?! (are|is) \w+\?)",
        "request, thread, caller, ...",
    ),
    Rule(r"\b([Ss]ome|[Nn]o|[Aa]ny|[Ee]very)(body|one)\b", "request, thread, user, ... (name it)"),
    Rule(r"\bthose (of|that|which|who|in|with|without|from|for|before|after)\b", "the noun again"),
    Rule(r"\bthose(?=[.,;:)]|$)", "the noun again"),
    Rule(r"\b[Tt]hat of\b", "the noun again"),
    Rule(r"\bneither that nor\b", "not ... and not ..."),
    Rule(r"\b[Ww]hat others\b", "name the things"),
    Rule(r"\b(giv(e|es|en|ing)|gave) way\b", "preempt"),
    Rule(r"\b(giv(e|es|en|ing)|gave) (\w+ ){0,3}back\b", "free, return"),
    Rule(r"\b(come|comes|came|coming) back\b", "resume, return"),
    Rule(rf"\b{COULD_BE} told\b", "receive, get a callback"),
    Rule(r"\bwhat (is|was|are|were) there\b(?! before)", "prefix hit, or the noun"),
    Rule(r"\b(is|are|was|were) there\b(?! (a|an|any|one|no|more|enough|before)\b)", "exist, or the noun"),
    Rule(r"\b[Pp]romis(e|es|ed|ing)\b", "reserve (blocks), guarantee"),
    Rule(r"\bat rest\b|\b[Rr]est(s|ed|ing)\b", "idle"),
    Rule(
        r"\b(put|puts|putting|go|goes|going|sent) to sleep\b|\basleep\b|\bawake\b", "swap out, swap in; wait"
    ),
    Rule(r"\bDrivers?\b", "EngineLoop, AsyncEngineLoop", allowed=r"NVIDIA|CUDA|(GPU|display) Driver"),
    Rule(r"\b[Ii]ntakes?\b", "InputProcessor"),
    Rule(r"\b[Pp]umps?\b", "AsyncEngineLoop"),
    Rule(
        r"\b[Bb]ranch(es)?\b",
        "Sequence, idle sequence",
        r"git|commit|\bcode\b|jump|template|\bif\b|default",
        PYTHON,
    ),
    Rule(r"\b[Ss]hel(f|ves)\b", "idle sequences"),
    Rule(r"\bDrafts?\b", "AllocationPlan"),
    Rule(r"\bChains?\b|\bchains? of (keys|hashes|blocks)\b|\bhash chains?\b", "BlockHashes, block hashes"),
    Rule(r"\bkeys? of (the|a|its) blocks?\b", "block hash"),
    Rule(r"\b[Pp]aces?\b", "PrefillBudget, prefill budget"),
    Rule(r"\b[Aa]llowances?\b", "prefill budget, limit"),
    Rule(r"\bGuides?\b(?! to)|\bguides?\b", "GrammarMatcher, grammar", within="pyvelo|scripts|tests|native"),
    Rule(r"\b[Cc]ompan(y|ies)\b", "shared prefix"),
    Rule(r"\b[Kk]ept blocks?\b|\bblocks? (is|are|that is|that are) kept\b", "cached block"),
    Rule(r"\b[Ss]tretch(es)?\b", "range, run of tokens"),
    Rule(r"\bweigh(s|ed|ing)?\b", "softmax weights; compare"),
    Rule(r"\bplaces\b", "output rows", within="native/ops"),
    Rule(r"[,;] for (it|they|there|then|we|who|nothing)\b", "because"),
    Rule(START + r"Where\b(?=[^.:?\n]*,)", "if, when"),
    Rule(
        r"(?:[,;]|\b(and|only|even|except|not|False|True|None|NULL|null|Error|empty|but|than)) where\b",
        "if, when",
    ),
    Rule(
        r"\bwhere (there|nothing|none|one|no|not|any|some|several|few|many|that|this|both|all)\b", "if, when"
    ),
    Rule(r"\bwhere (possible|necessary|needed|present|asked|wanted|known)\b", "if, when"),
    Rule(START + r"Of (?!course)\w+", "subject, verb, object"),
    Rule(START + r"(Behind|Beside|Among) (a|an|the|each|every)\b", "subject, verb, object"),
]

NO_VERB = re.compile(
    "(the|an?|one|each|every|all|some|any|no|its|their|it|they|th(is|at|ese|ose)|such|(an)?other|both|two|"
    "(no|every|some)thing|what(ever)?|where|whether|who(ever)?|how(ever)?|which|when|why|as|of|by|in|with(in|out)?|at|"
    "for|to|from|between|before|after|behind|beside|like|up|over|than|then|not|only|neither|more|once|there|until|"
    "token|length|number|text|size|value|line)",
    re.I,
)
"""First words of docstrings that are no sentences."""

QUESTION = re.compile("(what(ever)?|who(ever)?|where|which|how|when|of|it|this)", re.I)
"""First words of docstrings that name nothing."""

THIRD_PERSON = re.compile(
    "(adds|allows|chooses|compiles|does|edits|embeds|gives|has|holds|joins|keeps|lives|makes|owns|passes|prefers|"
    "prints|runs|says|stands|takes|watches|writes)",
    re.I,
)
"""First words of docstrings that say what a class does instead of what it is."""
