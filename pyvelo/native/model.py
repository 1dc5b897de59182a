"""Model: loading a GGUF file, its properties and its vocabulary."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, RequestError, check_path, shown
from ..lazy import lazy_property
from ._ffi import Handle, check, ffi, from_c, int32, ints, lib, read_bytes
from .library import follow_logger
from .watcher import Watcher

__all__ = ["Layer", "Model", "ModelInfo", "VocabInfo", "quantize", "token_array"]


@dataclass(frozen=True)
class ModelInfo:
    """Properties of a model. `size_bytes` are the bytes of its weights, `n_head` is of its first attention
    layer.

    `state_bytes` are the bytes of a saved recurrent state, 0 without one.
    `n_embd_out` is the size of an embedding. `pooling` is the pooling in the file: 0 none, 1 mean, 2 cls, 3
    last, 4 a score instead. `is_encoder`: the model embeds texts and generates none.
    """

    arch: str
    description: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_vocab: int
    n_ctx_train: int
    n_params: int
    size_bytes: int
    has_recurrent: bool
    state_bytes: int
    can_page: bool
    n_embd_out: int
    pooling: int
    is_encoder: bool


@dataclass(frozen=True)
class VocabInfo:
    """Size of the vocabulary, its special tokens (None: absent), and whether they are added to texts."""

    n_tokens: int
    bos: int | None
    eos: int | None
    eot: int | None
    pad: int | None
    add_bos: bool
    add_eos: bool


@dataclass(frozen=True)
class Layer:
    """Shape of one layer's cache for a token.

    `head_dim_v` is 0 if V is a view of K. `window` is in tokens, 0 without one. `window_type` is 0 for none,
    1 for the last `window` tokens, 2 for the tokens since the last multiple of `window`. `device` holds its
    weights and its cache, a number in `devices()`.
    """

    layer: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int
    window_type: int
    device: int


class Model(Handle):
    """Loaded GGUF model. Any thread may use it.

    Contexts and samplers of a model still work after its `close()`. The last of them frees the weights.

    Args:
        path: the GGUF file; the first one if the model is split.
        n_gpu_layers: layers on GPUs; -1 for all.
        gpu_layers: numbers of GPUs among all devices, with the layers of each, in the order of layers and
            n_gpu_layers in all; none: all GPUs share them by their free memory.
        use_mmap: map the file instead of reading it. A run reads the weights that it uses; the first run
            packs weights with a faster layout on this processor.
        vocab_only: load metadata and tokenizer only: no weights, no layers, and no sizes but `n_vocab`.
        check_tensors: refuse weights that are NaN or infinite.
        deterministic: use the layout of weights whose products do not depend on the batch.
        progress: called with 0..1 while loading, and again with 0..1 if the first run packs weights. It must
            not use the model. Returning False cancels. The load or the run raises its exceptions.

    Raises:
        ModelError: the file cannot be read or is damaged.
        UnsupportedError: layers are wanted on a GPU, but this build has no GPU backend.
        ConfigError: a setting is out of range.
        Cancelled: `progress` returned False.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        gpu_layers: Sequence[tuple[int, int]] = (),
        use_mmap: bool = True,
        vocab_only: bool = False,
        check_tensors: bool = False,
        deterministic: bool = False,
        progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        follow_logger()
        self._pieces: dict[int, bytes] = {}
        params = lib.velo_model_default_params()
        params.n_gpu_layers = int32("n_gpu_layers", n_gpu_layers)
        gpus = ffi.new("int32_t[]", [int32("gpu_layers", device) for device, _ in gpu_layers])
        counts = ffi.new("int32_t[]", [int32("gpu_layers", count) for _, count in gpu_layers])
        params.gpus, params.gpu_layers, params.n_gpus = gpus, counts, len(gpu_layers)
        params.use_mmap = bool(use_mmap)
        params.vocab_only = bool(vocab_only)
        params.check_tensors = bool(check_tensors)
        params.deterministic = bool(deterministic)
        self.watcher = Watcher(progress)
        if progress is not None:
            params.progress = lib.velo_py_progress
            params.progress_user = self.watcher.handle
        out = ffi.new("velo_model **")
        try:
            self.watcher.call(lib.velo_model_load, _path(path), ffi.new("velo_model_params *", params), out)
        finally:
            if out[0] != ffi.NULL:
                self._handle = ffi.gc(out[0], lib.velo_model_free)

        info = ffi.new("velo_model_info *")
        check(lib.velo_model_get_info(self.handle, info))
        found = from_c(ModelInfo, info)
        # without upstream's name of an unknown size
        self.info: ModelInfo = replace(found, description=found.description.replace(" ?B", ""))
        vocab = ffi.new("velo_vocab_info *")
        check(lib.velo_vocab_get_info(self.handle, vocab))
        self.vocab: VocabInfo = from_c(VocabInfo, vocab)
        self.layers: tuple[Layer, ...] = self._read_layers()
        refusal = read_bytes(lambda *to: lib.velo_model_refusal(self.handle, *to)).decode()
        self.refusal: str | None = refusal or None
        """Reason why the model cannot have a paged cache, None if it can."""

    def __repr__(self) -> str:
        return f"<Model {self.info.description}{', closed' if self.closed else ''}>"

    def _read_layers(self) -> tuple[Layer, ...]:
        count = ffi.new("int32_t *")
        status = lib.velo_model_layers(self.handle, ffi.NULL, 0, count)
        if status != lib.VELO_BUFFER_TOO_SMALL:
            check(status)
        found = ffi.new("velo_layer[]", count[0])
        check(lib.velo_model_layers(self.handle, found, count[0], count))
        return tuple(from_c(Layer, found[i]) for i in range(count[0]))

    @lazy_property
    def meta(self) -> Mapping[str, str]:
        """Metadata of the file as text, read on first use."""
        handle = self.handle
        count = ffi.new("int32_t *")
        check(lib.velo_model_meta_count(handle, count))
        found = {}
        for i in range(count[0]):
            key = read_bytes(lambda *to, i=i: lib.velo_model_meta_key(handle, i, *to))
            value = read_bytes(lambda *to, key=key: lib.velo_model_meta_value(handle, key, *to))
            found[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        return MappingProxyType(found)

    # ---- vocabulary ----

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the tokens of `text`.

        Args:
            text: what to tokenize.
            add_special: add the special tokens that the model expects, such as BOS.
            parse_special: read the text of control tokens, such as ``<|im_start|>``, as these tokens.

        Raises:
            RequestError: the text is not a string, or has surrogates, so it is not valid Unicode.
            UnsupportedError: the model has no vocabulary.
        """
        if not isinstance(text, str):
            raise RequestError(f"{shown(text)} is not a text: give a string")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error}") from error
        handle = self.handle
        count = ffi.new("int32_t *")
        capacity = len(data) + 8
        while True:
            tokens = np.empty(capacity, np.int32)
            target = ints(tokens)
            status = lib.velo_tokenize(
                handle, data, len(data), bool(add_special), bool(parse_special), target, capacity, count
            )
            if status != lib.VELO_BUFFER_TOO_SMALL:
                check(status)
                found: list[int] = tokens[: count[0]].tolist()
                return found
            capacity = count[0]

    def tokenize_more(self, text: str) -> list[int]:
        """Return the tokens of a text that follows other tokens, without special tokens.

        SentencePiece puts a space before every text; here it is left out. Raises as `tokenize`.
        """
        tokens = self.tokenize(text, add_special=False)
        if not self._adds_space:
            return tokens
        line = self.tokenize("\n", add_special=False)
        both = self.tokenize("\n" + text, add_special=False)
        return both[len(line) :] if both[: len(line)] == line else tokens

    @lazy_property
    def _adds_space(self) -> bool:
        first = self.tokenize("a", add_special=False)[:1]
        return any(self.token_bytes(token).startswith(b" ") for token in first)

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token: part of a character, or several characters.

        Args:
            token: its id.
            special: return bytes for control tokens, too.

        Raises:
            ConfigError: it is not in the vocabulary.
        """
        handle = self.handle
        piece = None if special else self._pieces.get(token)
        if piece is None:
            number = int32("token", token)
            piece = read_bytes(lambda *to: lib.velo_token_to_bytes(handle, number, bool(special), *to), 64)
            if not special:
                self._pieces[number] = piece
        return piece

    def all_token_bytes(self) -> list[bytes]:
        """Return `token_bytes` of every token, several times faster for a whole vocabulary."""
        handle, size = self.handle, 64
        buffer, length = ffi.new("char[]", size), ffi.new("size_t *")
        found = []
        for token in range(self.vocab.n_tokens):
            if lib.velo_token_to_bytes(handle, token, 0, buffer, size, length) == lib.VELO_OK:
                found.append(ffi.unpack(buffer, length[0]))
            else:
                found.append(self.token_bytes(token))
        return found

    def detokenize(self, tokens: Sequence[int] | npt.NDArray[np.int32], *, special: bool = False) -> bytes:
        """Return the text of tokens as bytes. `special` includes tokens that `tokenize` added.

        Raises:
            RequestError: a token is not in the vocabulary.
        """
        handle = self.handle
        try:
            array = token_array(tokens)
            source, n = ints(array), len(array)
            return read_bytes(
                lambda *to: lib.velo_detokenize(handle, source, n, bool(special), *to), 8 * n + 64
            )
        except ConfigError as error:
            raise RequestError(str(error)) from None

    def is_end(self, token: int) -> bool:
        """Return whether this token ends an answer.

        Raises:
            ConfigError: it is not in the vocabulary.
        """
        out = ffi.new("int32_t *")
        check(lib.velo_token_is_end(self.handle, int32("token", token), out))
        return bool(out[0])

    @lazy_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end an answer, in ascending order."""
        handle, out, found = self.handle, ffi.new("int32_t *"), []
        for token in range(self.vocab.n_tokens):
            check(lib.velo_token_is_end(handle, token, out))
            if out[0]:
                found.append(token)
        return tuple(found)


def _path(path: str | os.PathLike[str]) -> bytes:
    return os.fsencode(check_path(path))


def token_array(tokens: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return tokens as C reads them: int32 [n], contiguous.

    Raises:
        ConfigError: a token is not an integer of 32 bits, or the list is not flat.
    """
    if isinstance(tokens, np.ndarray) and tokens.dtype == np.int32:
        array = tokens
    else:
        if isinstance(tokens, (str, bytes, Mapping)) or not isinstance(tokens, Iterable):
            raise ConfigError(f"tokens={shown(tokens)}: give a list of token ids")
        try:
            given = tokens if isinstance(tokens, (np.ndarray, Sequence)) else list(tokens)
            wide = np.asarray(given if len(given) else np.empty(0, np.int64))
        except (OverflowError, ValueError, TypeError) as error:
            raise ConfigError(
                f"tokens must be whole numbers of 32 bits, got {shown(tokens)}: {error}"
            ) from error
        array = wide.astype(np.int32) if wide.dtype.kind in "iu" else np.empty(0, np.int32)
        if not np.array_equal(array, wide):
            raise ConfigError(f"tokens must be whole numbers of 32 bits, got {shown(tokens)}")
    if array.ndim != 1:
        raise ConfigError(f"tokens must be a flat list, but have {array.ndim} dimensions")
    return np.ascontiguousarray(array)


def quantize(
    source: str | os.PathLike[str], target: str | os.PathLike[str], type: str, n_threads: int = 0
) -> None:
    """Write the model in `source` to `target` with its weights as `type` ("Q4_K_M", "Q8_0", "F16", ...).

    `n_threads` of 0 uses all cores. An existing `target` is replaced after everything is written.

    Raises:
        ModelError: the source cannot be read, is damaged, or is quantized already.
        ConfigError: the type does not exist, or source and target are the same file.
    """
    if not isinstance(type, str):
        raise ConfigError(f"type={type!r}: give the name of a type, such as 'Q4_K_M'")
    check(lib.velo_model_quantize(_path(source), _path(target), type.encode(), int32("n_threads", n_threads)))
