"""Files that are truncated while they are mapped: an error, and the process and other models still work."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fuzz._document import Value, read_document, write_document
from tests import forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the handler is Linux's")

COMMON = """
import faulthandler, mmap, os, sys, threading
faulthandler.enable()  # as pytest does it, before
from pyvelo.errors import ModelError
from pyvelo.native import Context, Model, StepArrays, quantize
from tests.native.steps import Seq, logits_of, run

class Runner:
    def __init__(self, path, **options):
        self.model = Model(path, **options)
        self.context = Context(self.model, n_blocks=8, max_batch_tokens=64, max_seqs=4, max_seq_len=128,
                               n_threads=3, deterministic=options.get("deterministic", False))
    def logits(self):
        arrays = StepArrays(max_tokens=64, max_seqs=4, max_width=4, max_copies=4)
        run(self.context, arrays, [(Seq([0]), list(range(1, 30)))])
        return logits_of(self.context, 1).tobytes()

def refused(call):
    try:
        call()
    except ModelError as error:
        assert "became shorter while it was in use" in str(error), error
        return
    raise AssertionError("no error")

sound, path = sys.argv[1:]
"""


def child(code: str, sound: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    copy = Path(shutil.copy(sound, folder / "copy.gguf"))
    command = [sys.executable, "-c", COMMON + code, str(sound), str(copy)]
    # not in the checkout, whose package may lack the compiled module
    return forks.run(command, text=True, cwd=folder)


def lives(code: str, sound: Path, folder: Path) -> None:
    done = child(code, sound, folder)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.parametrize("left", [0, 4096, 3_000_000])
def test_cut_before_weights_are_packed(packed_model: Path, tmp_path: Path, left: int) -> None:
    code = f"""
one, other, twin = Runner(path), Runner(sound), Runner(path)
os.truncate(path, {left})
for _ in range(2):
    refused(one.logits)
refused(twin.logits)
with open(sound, "rb") as source, open(path, "rb+") as target:
    target.write(source.read())
for cut in (one, twin):  # half of their weights were packed from zeros
    refused(cut.logits)
assert other.logits() == Runner(path).logits() == Runner(path, use_mmap=False).logits()
print("alive")
"""
    lives(code, packed_model, tmp_path)


def test_cut_while_weights_are_packed(packed_model: Path, tmp_path: Path) -> None:
    code = """
ends = []
def watch(share):
    ends.extend([share] if share == 1.0 else [])
    if len(ends) == 1 and 0.3 < share < 1.0:
        os.truncate(path, 4096)
one = Runner(path, progress=watch)
assert ends == [1.0]
for _ in range(2):
    refused(one.logits)
assert Runner(sound).logits() == Runner(sound, use_mmap=False).logits()
print("alive")
"""
    lives(code, packed_model, tmp_path)


def test_cut_before_an_embedder_packs(packed_model: Path, tmp_path: Path) -> None:
    code = """
from pyvelo.native import Embedder
embedder = Embedder(Model(path), max_tokens=64, n_threads=2)
os.truncate(path, 4096)
for _ in range(2):
    refused(lambda: embedder.embed([[1, 2, 3]], 1))
print("alive")
"""
    lives(code, packed_model, tmp_path)


def test_cut_after_weights_were_packed(packed_model: Path, tmp_path: Path) -> None:
    code = """
one = Runner(path)
before = one.logits()
os.truncate(path, 4096)  # some are used in their mapping
refused(one.logits)
print("alive")
"""
    lives(code, packed_model, tmp_path)


@pytest.mark.parametrize("left", [0, 4096, 300_000])
def test_cut_before_a_run(tiny_model_f32: Path, tmp_path: Path, left: int) -> None:
    code = f"""
one, other, twin = Runner(path), Runner(sound), Runner(path)
before = other.logits()
assert one.logits() == before
os.truncate(path, {left})
for _ in range(2):
    refused(one.logits)
refused(twin.logits)  # of the same file, in its own mapping
assert other.logits() == before
del one, twin
assert other.logits() == before
assert Runner(sound).logits() == before
print("alive")
"""
    lives(code, tiny_model_f32, tmp_path)


def test_cut_during_runs(tiny_model_f32: Path, tmp_path: Path) -> None:
    code = """
one = Runner(path, deterministic=True)
threading.Timer(0.3, os.truncate, (path, 4096)).start()
try:
    while True:
        one.logits()
except ModelError as error:
    assert "became shorter" in str(error)
    print("alive")
"""
    lives(code, tiny_model_f32, tmp_path)


@pytest.mark.parametrize("deterministic", [False, True])
def test_cut_during_a_load(tiny_model: Path, tmp_path: Path, deterministic: bool) -> None:
    code = f"""
def cut(share):
    if share > 0.2:
        os.truncate(path, 4096)
def load():
    Runner(path, progress=cut, deterministic={deterministic}).logits()
refused(load)
Runner(sound).logits()
print("alive")
"""
    lives(code, tiny_model, tmp_path)


@pytest.mark.parametrize("model", ["tiny_model_f32", "packed_model"])
@pytest.mark.parametrize("runs_before", [False, True])
def test_parts_of_a_model(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, runs_before: bool
) -> None:
    whole = request.getfixturevalue(model)
    document = read_document(whole)
    tensors, values = document.tensors, document.values
    counts = [Value(b"split.count", 2, 2), Value(b"split.tensors.count", 5, len(tensors))]
    for number, part in enumerate((tensors[:4], tensors[4:])):
        document.values = [*(values if number == 0 else ()), *counts, Value(b"split.no", 2, number)]
        document.tensors = part
        name = tmp_path / f"model-{number + 1:05}-of-00002.gguf"
        name.write_bytes(write_document(document))
    code = f"""
first = os.path.dirname(path) + "/model-00001-of-00002.gguf"
one = Runner(first)
if {runs_before}:
    assert one.logits() == Runner(sound, use_mmap=False).logits()
os.truncate(first.replace("00001-of", "00002-of"), 1000)
refused(one.logits)
print("alive")
"""
    lives(code, whole, tmp_path)


def test_cut_during_a_quantization(tiny_model_f32: Path, tmp_path: Path) -> None:
    code = """
target = path + ".q8"
def cut():
    while not os.path.exists(target + ".partial"):
        pass
    os.truncate(path, 4096)
thread = threading.Thread(target=cut)
thread.start()
try:
    quantize(path, target, "Q8_0")
except ModelError:  # or it had finished
    assert not os.path.exists(target) and not os.path.exists(target + ".partial")
thread.join()
print("alive")
"""
    lives(code, tiny_model_f32, tmp_path)


@pytest.mark.parametrize("handler", [False, True])
def test_faults_in_other_mappings_still_end_the_process(
    tiny_model_f32: Path, tmp_path: Path, handler: bool
) -> None:
    code = f"""
if not {handler}:
    faulthandler.disable()
one = Runner(path)
with open(sound + ".mapped", "wb+") as file:
    file.truncate(1 << 16)
    pages = mmap.mmap(file.fileno(), 1 << 16)
    file.truncate(0)
print("now", flush=True)
pages[40_000]
print("past it")
"""
    done = child(code, Path(shutil.copy(tiny_model_f32, tmp_path / "sound.gguf")), tmp_path)
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "now\n"
    assert ("Fatal Python error: Bus error" in done.stderr) == handler


@pytest.mark.parametrize("runs", [False, True])
def test_a_user_mapping_of_a_model_file(tiny_model_f32: Path, tmp_path: Path, runs: bool) -> None:
    code = f"""
faulthandler.disable()
with open(path, "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
one = Runner(path, deterministic=True)
again = mmap.mmap(os.open(path, os.O_RDONLY), 0, prot=mmap.PROT_READ)  # perhaps next to the model's mapping
os.truncate(path, 4096)
if {runs}:
    refused(one.logits)
print("now", flush=True)
if os.fork() == 0:
    pages[40_000]
    os._exit(1)
assert os.waitstatus_to_exitcode(os.wait()[1]) == -7
again[40_000]
print("past it")
"""
    done = child(code, tiny_model_f32, tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "now\n"), done.stderr


def test_a_fault_ends_the_process_if_the_signal_is_ignored(tiny_model_f32: Path, tmp_path: Path) -> None:
    code = """
import signal
faulthandler.disable()
signal.signal(signal.SIGBUS, signal.SIG_IGN)
one = Runner(path)
os.kill(os.getpid(), signal.SIGBUS)
with open(path + ".mapped", "wb+") as file:
    file.truncate(1 << 16)
    pages = mmap.mmap(file.fileno(), 1 << 16)
    file.truncate(0)
print("now", flush=True)
pages[40_000]
print("past it")
"""
    done = child(code, tiny_model_f32, tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "now\n")


def test_a_fork_during_the_handler(tiny_model_f32: Path, tmp_path: Path) -> None:
    code = """
import signal, time
many = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ | (i % 2 * mmap.PROT_WRITE)) for i in range(10_000)]
spare = [Model(sound) for _ in range(2)]
ones = [Runner(path, deterministic=True) for _ in range(4)]
os.truncate(path, 4096)
def fault():
    for one in ones:
        refused(one.logits)
thread = threading.Thread(target=fault)
thread.start()
children = []
while thread.is_alive():
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        spare.clear()  # waits for the handler
        os._exit(0)
    children.append(pid)
    time.sleep(0.001)  # the handler needs a core, too
thread.join()
assert children and all(os.waitpid(pid, 0)[1] == 0 for pid in children), children
print("alive")
"""
    lives(code, tiny_model_f32, tmp_path)


def test_a_signal_from_kill(tiny_model_f32: Path, tmp_path: Path) -> None:
    code = """
faulthandler.disable()
one = Runner(path)
os.kill(os.getpid(), 7)
print("past it")
"""
    done = child(code, tiny_model_f32, tmp_path)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")


def test_a_handler_in_python_stays(tiny_model_f32: Path, tmp_path: Path) -> None:
    code = """
import signal
faulthandler.disable()
seen = []
signal.signal(signal.SIGBUS, lambda *_: seen.append(1))
one = Runner(path)
os.kill(os.getpid(), signal.SIGBUS)
assert seen == [1]
os.truncate(path, 4096)
refused(one.logits)
assert seen == [1]
print("alive")
"""
    lives(code, tiny_model_f32, tmp_path)


def test_cut_before_texts_are_embedded(tiny_model_f32: Path, tmp_path: Path) -> None:
    code = """
from pyvelo.native import Embedder
model = Model(path, deterministic=True)
embedder = Embedder(model, max_tokens=64, n_threads=2)
assert embedder.embed([[1, 2, 3]], 1).any()
os.truncate(path, 4096)
for _ in range(2):
    refused(lambda: embedder.embed([[1, 2, 3]], 1))
print("alive")
"""
    lives(code, tiny_model_f32, tmp_path)
