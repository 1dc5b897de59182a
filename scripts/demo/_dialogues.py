"""Dialogues for the demo model, made from _texts.py: equal random numbers give equal dialogues."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from scripts.demo import _about as about
from scripts.demo import _texts as texts
from scripts.demo._vocab import BOS, BOT, END, USER, Vocab

# Kinds of tokens for the loss: a user's word, an answer's, the first token of a recalled value, its others,
# a sum, and the first tokens of an answer, which select the answer.
HEARD, TEXT, FIRST, RECALL, SUM, CHOICE = range(6)
CHOICES = 4
_SYLLABLES = "ba co di fu ga he li mo nu pa ri so ta ve wi xo zu ken lor mit ran sel tor"
SYLLABLES = _SYLLABLES.split()


def held_out(x: int, y: int) -> bool:
    """Return whether x + y is kept from training: a tenth of all pairs, without the documented 12 + 30."""
    return (x * 37 + y * 91 + 5) % 10 == 0


def sum_answer(x: int, y: int) -> str:
    """Return the sum in steps: ones, tens with the carry, result."""
    ones = x % 10 + y % 10
    tens = x // 10 + y // 10 + ones // 10
    carry = " + 1" if ones > 9 else ""
    return f"{x % 10} + {y % 10} = {ones}, {x // 10} + {y // 10}{carry} = {tens}, so {x + y}."


def varied(text: str, rng: Random, around: bool = False) -> str:
    """Return the question as others would type it: without its end mark, in lower case, in capitals.

    With `around` also with a word or two before or after it.
    """
    if rng.random() < 0.35:
        text = text.rstrip("?.!") + rng.choice(("", "", "?", ".", "!"))
    if around and rng.random() < 0.15:
        text = f"{rng.choice(texts.BEFORE)}{rng.choice((' ', ', '))}{text[:1].lower()}{text[1:]}"
    if around and rng.random() < 0.1:
        end = text[len(text.rstrip("?.!")) :]
        text = f"{text.rstrip('?.!')} {rng.choice(texts.BEHIND)}{end}"
    kind = rng.random()
    if kind < 0.25:
        return text.lower()
    return text.upper() if kind < 0.29 else text


@dataclass(frozen=True)
class Person:
    """Person that the user named: "Anna", "Berger", "4821"; the digits may be missing."""

    name: str
    surname: str
    digits: str

    def put(self, template: str) -> str:
        return template.format(n=self.name, s=self.surname, d=self.digits).replace(" .", ".")


@dataclass
class Dialogue:
    """Growing chat. `kinds[i]` is the kind of token i for the loss, `turns` the starts of users' turns."""

    vocab: Vocab
    rng: Random
    ids: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    messages: list[tuple[str, str]] = field(default_factory=list)
    people: list[Person] = field(default_factory=list)
    asked: dict[Person, int] = field(default_factory=dict)
    my_name: str = ""
    sums: Callable[[int, int], bool] = lambda x, y: not held_out(x, y)

    def __post_init__(self) -> None:
        self.add([self.vocab.ids[BOS]], HEARD)

    def add(self, ids: list[int], kind: int) -> None:
        self.ids += ids
        self.kinds += [kind] * len(ids)

    def say(self, question: str, answer: str, kind: int = TEXT) -> int:
        """Add a turn; return the position of the answer."""
        ids = self.vocab.ids
        self.turns.append(len(self.ids))
        self.messages.append((question, answer))
        self.add([ids[USER], *self.vocab.encode(" " + question), ids[END], ids[BOT]], HEARD)
        start = len(self.ids)
        self.add(self.vocab.encode(answer), kind)
        self.add([ids[END]], TEXT)
        if kind == TEXT:
            self.kinds[start : start + CHOICES] = [CHOICE] * len(self.kinds[start : start + CHOICES])
        return start

    # ---- people ----

    def tell(self) -> None:
        """Introduce a new person.

        Surnames differ within a dialogue, since the digits are found by the surname.
        """
        names = [n for n in texts.NAMES if n not in {p.name for p in self.people}]
        surnames = [s for s in texts.SURNAMES if s not in {p.surname for p in self.people}]
        count = 4 if self.rng.random() < 0.7 else self.rng.choice((0, 1, 2, 3, 5, 6))
        digits = "".join(self.rng.choices("0123456789", k=count))
        person = Person(self.rng.choice(names), self.rng.choice(surnames), digits)
        if self.rng.random() < 0.02 and Person(*texts.EXAMPLE) not in self.people:
            person = Person(*texts.EXAMPLE)
        self.people.append(person)
        statement = person.put(self.rng.choice(texts.TELL))
        self.say(statement.lower() if self.rng.random() < 0.1 else statement, texts.TOLD)

    def ask(self, person: Person | None = None) -> None:
        """Ask for a person; without `person` for one with few questions so far."""
        if person is None:
            few = [self.rng.choice(self.people) for _ in range(3)]
            person = min(few, key=lambda p: self.asked.get(p, 0))
        self.asked[person] = self.asked.get(person, 0) + 1
        question = person.put(self.rng.choice(texts.ASK))
        start = self.say(
            varied(question, self.rng) if self.rng.random() < 0.3 else question,
            person.put(texts.PERSON),
            RECALL,
        )
        self.kinds[start + 1] = FIRST

    def ask_unknown(self) -> None:
        """Ask for a person without an introduction, or with a name that is no token."""
        if self.rng.random() < 0.3:
            name, surname = self.rng.choice(texts.NAMES), self.rng.choice(texts.SURNAMES)
            template = self.rng.choice([*texts.TELL, *texts.ASK])
            word = strange_word(self.rng).capitalize()
            if template in texts.TELL and self.rng.random() < 0.4:
                surname = word
            else:
                name = word
            digits = "".join(self.rng.choices("0123456789", k=4))
            self.say(Person(name, surname, digits).put(template), texts.STRANGER)
            return
        names = [n for n in texts.NAMES if n not in {p.name for p in self.people}]
        name = self.rng.choice(names)
        start = self.say(self.rng.choice(texts.ASK).format(n=name), texts.NOT_TOLD.format(n=name))
        self.kinds[start] = RECALL

    def own_name(self) -> None:
        """Say the user's own name, or ask for it."""
        if self.my_name and self.rng.random() < 0.6:
            start = self.say(
                varied(self.rng.choice(texts.ASK_MY_NAME), self.rng), texts.YOUR_NAME.format(n=self.my_name)
            )
            self.kinds[start + 3] = RECALL
        elif not self.my_name:
            self.my_name = self.rng.choice(texts.NAMES)
            self.say(
                self.rng.choice(texts.MY_NAME).format(n=self.my_name), texts.GREETED.format(n=self.my_name)
            )

    # ---- other talk ----

    def add_up(self) -> None:
        while True:
            # only a tenth of all numbers has one digit: too few to learn them
            x, y = (self.rng.randrange(10 if self.rng.random() < 0.15 else 100) for _ in range(2))
            if self.sums(x, y):
                break
        question = self.rng.choice(texts.SUM).format(x=x, y=y)
        self.say(varied(question, self.rng) if self.rng.random() < 0.3 else question, sum_answer(x, y), SUM)

    def about(self) -> None:
        questions, answer = self.rng.choice(about.ABOUT)
        self.say(varied(self.rng.choice(questions), self.rng, around=True), answer)

    def strange(self) -> None:
        """Ask something that the model cannot know; it answers so."""
        rng = self.rng
        if rng.random() < 0.2:
            template = rng.choice(texts.BIG_ASK + texts.OTHER_OPERATION)
            x, y = rng.randrange(1000), rng.randrange(1000)
            if template in texts.BIG_ASK and max(x, y) < 100:
                x += 100
            self.say(varied(template.format(x=x, y=y), rng), texts.BIG)
            return
        template = rng.choice(texts.STRANGE)
        while "{w}" in template:
            word = rng.choice(texts.NOUNS) if rng.random() < 0.6 else strange_word(rng)
            template = template.replace("{w}", word, 1)
        self.say(varied(template, rng), about.UNKNOWN)

    def talk(self) -> None:
        parts = (texts.TALK_SUBJECTS, texts.TALK_VERBS, texts.TALK_TIMES)
        self.say(" ".join(self.rng.choice(part) for part in parts) + ".", texts.TALKED)

    def other(self) -> None:
        """Add a turn that is rarely about people."""
        kind = self.rng.random()
        if kind < 0.25:
            self.add_up()
        elif kind < 0.6:
            self.about()
        elif kind < 0.8:
            self.strange()
        elif kind < 0.91:
            self.talk()
        elif kind < 0.97:
            self.ask_unknown()
        else:
            self.own_name()


def strange_word(rng: Random) -> str:
    """Return a word that is in no list."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(2, 5)))


def training(vocab: Vocab, rng: Random, length: int) -> Dialogue:
    """Return a dialogue of over `length` tokens: mostly people first, then all kinds mixed.

    People come first so that a question must select by name. Half of the long ones wait: there is no question
    about people until near the end, and then each is asked for once.
    """
    d = Dialogue(vocab, rng)
    first = rng.randrange(2, min(3 + length // 48, 24)) if rng.random() < 0.75 else 0
    most = min(rng.randrange(first, 8 + length // 24), 50)
    while len(d.people) < first:
        d.tell()
    if length >= 256 and rng.random() < 0.5:
        end = length - rng.randrange(1, first + 3) * 25
        while len(d.ids) < end:
            d.tell() if rng.random() < 0.08 and len(d.people) < most else d.other()
    ask, tell = rng.uniform(0.3, 0.6), rng.uniform(0.05, 0.3)
    while len(d.ids) <= length:
        kind = rng.random()
        if kind < tell and len(d.people) < most:
            d.tell()
        elif kind < tell + ask and d.people:
            d.ask()
        else:
            d.other()
    return d


def opening(vocab: Vocab, rng: Random, length: int) -> Dialogue:
    """Return the start of a dialogue with few people: before a first question nothing can be recalled."""
    d = Dialogue(vocab, rng)
    while len(d.ids) <= length:
        kind = rng.random()
        if kind < 0.1:
            d.tell()
        elif kind < 0.2 and d.people:
            d.ask()
        else:
            d.other()
    return d


def drill(vocab: Vocab, rng: Random, length: int) -> Dialogue:
    """Return lists that repeat earlier words, so that nearly every token can be looked up.

    Half of them are lists of names of which runs repeat; the others say "Anna Berger 4821." repeatedly.
    """
    d = Dialogue(vocab, rng)
    if rng.random() < 0.5:
        words = rng.sample(texts.NAMES + texts.SURNAMES, rng.randrange(4, max(6, min(120, length // 3))))
        ids = [vocab.encode(" " + word)[0] for word in words]
        d.add(ids, HEARD)
        while len(d.ids) <= length:
            at = rng.randrange(len(ids) - 2)
            d.add([ids[at]], HEARD)
            d.add(ids[at + 1 : at + 2 + rng.randrange(4)], RECALL)
        return d
    count = min(rng.randrange(2, 3 + length // 10), 60)
    pairs = zip(rng.sample(texts.NAMES, count), rng.sample(texts.SURNAMES, count), strict=True)
    people = [Person(n, s, "".join(rng.choices("0123456789", k=4))) for n, s in pairs]
    said: set[Person] = set()
    while len(d.ids) <= length:
        person = rng.choice(people)
        ids = vocab.encode(" " + person.put(texts.PERSON))
        d.turns.append(len(d.ids))
        d.add(ids, RECALL if person in said else HEARD)
        d.kinds[-len(ids)] = HEARD
        d.kinds[-1] = HEARD
        if person in said:
            d.kinds[-len(ids) + 1] = FIRST
        said.add(person)
    return d


def probe(vocab: Vocab, rng: Random, distance: int, people: int = 5) -> tuple[Dialogue, list[Person]]:
    """Return a dialogue of people, then at least `distance` tokens of other talk.

    Also returns the people to ask for.
    """
    d = Dialogue(vocab, rng)
    for _ in range(people):
        d.tell()
    wanted, start = list(d.people), len(d.ids)
    while len(d.ids) - start < distance:
        d.tell() if rng.random() < 0.05 else d.other()
    return d, wanted
