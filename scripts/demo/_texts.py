"""Texts of the demo model's dialogues: people, sums, small talk, and what it does not know."""

from __future__ import annotations

_NAMES = """
Anna Ben Clara David Emma Felix Greta Hugo Ida Jonas Karl Lena Max Nina Oscar Paula Quinn Rosa Simon Tina
Umar Vera Walter Xenia Yusuf Zoe Adam Bella Carlos Diana Erik Fiona Georg Hanna Ivan Julia Kevin Laura Marco
Nadia Otto Petra Ralf Sara Tom Ursula Victor Wanda Yara Zara Alice Bruno Chloe Dora Elias Frida Gino Helga
Igor Jana Lukas Maria Noah Olga Peter John Mary James Sarah Paul Lisa Mark Eva Daniel Sophie Thomas Michael
Robert William Richard Joseph Charles Christopher Matthew Anthony Steven Andrew George Edward Brian Ronald
Jason Jeff Ryan Jacob Gary Nick Eric Jonathan Stephen Larry Justin Scott Brandon Benjamin Samuel Frank Alex
Jack Dennis Jerry Henry Patrick Jennifer Linda Elizabeth Barbara Susan Jessica Karen Nancy Betty Margaret
Sandra Ashley Kim Emily Donna Michelle Carol Amanda Melissa Deborah Rebecca Sharon Cynthia Kate Amy Angela
Anne Brenda Pamela Nicole Christine Martin Stefan Andreas Sebastian Markus Tobias Florian Jan Tim Leon
Paulina Sofia Mia Emilia Marie Johanna Katharina Ahmed Ali Fatima Omar Wei Ming Yuki Hiro Raj Priya Pedro
Juan Luis Ana Pierre Jean Luca Giulia Bob Charlie Dave Sam Joe Bill Mike Dan Lucy Grace Ella Oliver Harry
Liam Ethan Mason Logan Lucas Leo Theo
"""
NAMES = _NAMES.split()
_SURNAMES = """
Berger Stone Miller Weber Fisher Baker Carter Hunter Cook Smith Taylor Potter Archer Cooper Turner Walker
Brook Field Hill Wood Lake Marsh Forest Castle Bridge Church Moore Young King Bishop Abbot Page Knight
Steward Shepherd Gardner Farmer Butler Porter Brown Jones Evans Clark Lewis Green Adams Nelson Rivera Silva
Novak Larsen Keller Fuchs Rossi Dubois Costa Lopez Johnson Williams Davis Garcia Rodriguez Martinez
Hernandez Wilson Anderson Jackson White Harris Thompson Robinson Wright Torres Nguyen Flores Hall Campbell
Mitchell Roberts Gomez Phillips Parker Edwards Collins Reyes Stewart Morris Murphy Rogers Morgan Peterson
Bailey Reed Kelly Howard Ramos Cox Ward Richardson Watson Brooks Chavez Bennett Gray Mendoza Ruiz Hughes
Price Alvarez Sanders Patel Myers Long Ross Foster Schmidt Schneider Fischer Meyer Wagner Becker Schulz
Hoffmann Koch Bauer Richter Klein Wolf Schwarz Zimmermann Braun Hartmann Lange Krause Lehmann Maier Vogel
Kaiser Wang Chen Singh Kumar Sato Tanaka Ivanov Lee Khan Bond Holmes
"""
SURNAMES = _SURNAMES.split()

TELL = [
    "This is {n} {s} {d}.",
    "Remember {n} {s} {d}.",
    "Please remember {n} {s} {d}.",
    "Meet {n} {s} {d}.",
    "Note {n} {s} {d}.",
    "{n} {s} {d}.",
    "I know {n} {s} {d}.",
    "My friend is {n} {s} {d}.",
]
TOLD = "Noted."
ASK = [
    "Who is {n}?",
    "Who is {n}?",
    "Who was {n}?",
    "Tell me about {n}.",
    "Do you remember {n}?",
    "What do you know about {n}?",
    "Say {n} again.",
    "And {n}?",
    "What is {n}'s number?",
    "What is the number of {n}?",
    "{n}?",
]
PERSON = "{n} {s} {d}."
EXAMPLE = ("Jane", "Doe", "4821")  # used in the help, so no other person may have these names
NOT_TOLD = "{n} is unknown to me."
# to a name that is no single token
STRANGER = "I do not know that name: I only know some common ones."

# words around a question
BEFORE = ["please", "so", "ok", "hey", "well", "and", "can you tell me", "tell me", "I want to know", "now"]
BEHIND = ["please", "then", "exactly", "now", "actually", "really", "today"]

MY_NAME = ["My name is {n}.", "I am {n}.", "Call me {n}."]
GREETED = "Hello {n}!"
ASK_MY_NAME = ["What is my name?", "Do you know my name?", "Who am I?"]
YOUR_NAME = "Your name is {n}."

SUM = [
    "What is {x} + {y}?",
    "What is {x} + {y}?",
    "What is {x} plus {y}?",
    "{x} + {y}",
    "{x} + {y} = ?",
    "{x}+{y}",
    "{x} plus {y}",
    "Add {x} and {y}.",
    "Please add {x} and {y}.",
    "How much is {x} + {y}?",
    "What's {x} + {y}?",
    "Can you add {x} and {y}?",
    "Compute {x} + {y}.",
]
BIG = "I can only add two numbers below 100."
BIG_ASK = [
    "What is {x} + {y}?",
    "What is {x} plus {y}?",
    "{x} + {y}",
    "Add {x} and {y}.",
    "How much is {x} + {y}?",
]
OTHER_OPERATION = [
    "What is {x} - {y}?",
    "What is {x} * {y}?",
    "What is {x} times {y}?",
    "What is {x} minus {y}?",
    "{x} - {y}",
    "{x} * {y}",
    "{x} / {y}",
]

TALK_SUBJECTS = [
    "The weather",
    "My garden",
    "The train",
    "My neighbour",
    "The old house",
    "This book",
    "The market",
    "Our school",
    "The river",
    "The bakery",
    "My work",
    "The music",
]
TALK_VERBS = [
    "is very nice",
    "was late again",
    "looks quite strange",
    "makes me happy",
    "is not far from here",
    "was full of people",
    "smells like fresh bread",
    "needs a little work",
    "seems to be quiet",
    "was better last year",
]
TALK_TIMES = [
    "today",
    "this morning",
    "in the summer",
    "every week",
    "as always",
    "after the rain",
    "at night",
    "now",
]
TALKED = "I see."

# questions that it cannot answer; {w} is a word of NOUNS, or a spelled one
STRANGE = [
    "What is the capital of {w}?",
    "What is the weather in {w}?",
    "What is {w}?",
    "What is a {w}?",
    "Where is {w}?",
    "Who is the president of {w}?",
    "Who wrote {w}?",
    "Who invented the {w}?",
    "When was {w} born?",
    "Why is the {w} {w}?",
    "How do I make {w}?",
    "How many {w} are there?",
    "How old is {w}?",
    "Write a {w} about {w}.",
    "Write me a {w}.",
    "Write code that can {w}.",
    "Write a story about a {w}.",
    "Write a poem about {w}.",
    "Tell me a joke.",
    "Tell me a story.",
    "Tell me about the {w}.",
    "Tell me something about {w}.",
    "Explain {w}.",
    "Explain {w} to a {w}.",
    "Translate {w} into {w}.",
    "What do you think about {w}?",
    "Do you like {w}?",
    "Can you {w}?",
    "Can you write {w}?",
    "Please {w} the {w}.",
    "I like {w}.",
    "I want {w}.",
    "Give me a list of {w}.",
    "Is {w} better than {w}?",
    "What time is it?",
    "What day is it?",
    "What is the meaning of life?",
    "Which {w} is the best?",
    "Show me the {w}.",
    "{w}",
    "{w} {w}",
    "{w} {w} {w}",
    "{w} {w} {w} {w} {w}",
    "{w}?",
]
_NOUNS = """
France Germany Italy Spain Europe America London Paris Berlin world sun moon sky blue water fire food bread
cake pizza coffee dog cat bird horse fish tree flower love life time money music film game football car
house city computer Python program function code data list file number word letter poem story song joke
recipe history science physics math chemistry space planet earth star god king queen president war peace
summer winter friend mother father child school doctor book phone internet red green big small good bad run
sort parse swim sing dance play
"""
NOUNS = _NOUNS.split()
