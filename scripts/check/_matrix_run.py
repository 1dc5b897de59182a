"""Run configurations of the matrix: the same requests alone and together over a model of the shape.

As a program, read configurations from standard input, a line of JSON each, and print their findings likewise.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # behind an installed pyvelo

from scripts.check._matrix_axes import Config
from scripts.check._matrix_logprobs import N_CTX, too_far
from scripts.models._shapes import Shape
from scripts.models.lora import random_pairs, write_adapter
from scripts.models.make import write_model

if TYPE_CHECKING:
    from pyvelo import AsyncLLM, SamplingParams
    from pyvelo.outputs import RequestOutput

__all__ = ["findings"]

N_VOCAB = 900
LAYERS = 2
N_TOP = 20
"""Number of compared logprobs of a token. With 4, the contiguous path has some near the truth by chance."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """A request of `n` samples, or an answer of a session. `cancelled`: after one to three pieces."""

    prompt: Tokens
    max_tokens: int
    n: int = 1
    seed: int = 0
    priority: int = 0
    salt: str = ""
    min_tokens: int = 0
    stop_token_ids: Tokens = ()
    cancelled: bool = False
    lora: str = ""


@dataclass(frozen=True)
class Talk:
    """A session that computes `begin`. It and its forks each append a text and answer."""

    begin: Tokens
    texts: tuple[Tokens, ...]
    max_tokens: int
    lora: str = ""

    def jobs(self) -> list[Job]:
        """Return the requests that must get the same answers."""
        return [Job(self.begin + text, self.max_tokens, lora=self.lora) for text in self.texts]


def shape_of(config: Config) -> Shape:
    """Return a small model with the heads of the configuration."""
    width = config.heads * config.head_dim
    return Shape(
        arch=config.arch,
        layers=LAYERS,
        embd=width if config.arch in ("qwen2", "lfm2") else 64,
        ffn=64,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        ctx=N_CTX,
        window=config.window,
        experts=2 if config.arch == "gpt-oss" else 0,
    )


def adapters_of(config: Config) -> list[str]:
    """Return the names of the adapters."""
    return [f"adapter {number}" for number in range(config.adapters)]


def write_adapters(config: Config, model: Path) -> None:
    """Write the adapters beside the model."""
    for seed, name in enumerate(adapters_of(config)):
        pairs = random_pairs(model, 4, seed=seed)
        write_adapter(model.with_name(f"{name}.gguf"), config.arch, pairs)


def jobs_of(config: Config) -> list[Job]:
    """Draw the requests: prompts with a common prefix."""
    draw = random.Random(config.seed)
    prefix = _text(draw, config.prefix)
    same = _text(draw, draw.randint(1, 20))
    return [
        Job(
            prompt=prefix + (same if config.tails == "equal" else _text(draw, draw.randint(1, 20))),
            max_tokens=(max_tokens := draw.randint(1, 5)),
            min_tokens=draw.choice([0, 0, max_tokens // 2, max_tokens]),
            stop_token_ids=draw.choice([(), (), tuple(range(5, N_VOCAB, 4))]),
            n=config.n,
            seed=draw.randrange(1 << 32) if config.tails == "own" else config.seed,
            priority=draw.choice([0, 0, 1, -1]),
            salt=draw.choice(["", "", "other"]),
            cancelled=config.cancels and draw.random() < 0.3,
            lora=draw.choice(["", *adapters_of(config)]),
        )
        for _ in range(config.sequences)
    ]


def talks_of(config: Config) -> list[Talk]:
    """Draw the sessions. Often whole blocks and one token long: then the computed part ends with a block."""
    if config.sessions == "none":
        return []
    draw = random.Random(config.seed + 1)
    n_begin = config.prefix // config.block_size * config.block_size + 1 + draw.choice([0, 0, 1, 7])
    begin = _text(random.Random(config.seed), config.prefix)[:n_begin]
    begin += _text(draw, n_begin - len(begin))
    n_texts = 1 if config.sessions == "compute" else 3
    return [
        Talk(
            begin,
            tuple(_text(draw, draw.randint(1, 9)) for _ in range(n_texts)),
            draw.randint(1, 8),
            draw.choice(["", *adapters_of(config)]),
        )
        for _ in range(2)
    ]


def _text(draw: random.Random, n: int) -> Tokens:
    return tuple(draw.randrange(5, N_VOCAB) for _ in range(n))


def params_of(config: Config, job: Job) -> SamplingParams:
    """Return the parameters of a request; sessions (without a prompt) cannot have prompt logprobs."""
    from pyvelo import SamplingParams

    drawn: dict[str, Any] = {"temperature": 0.0}
    if config.draw == "seeded":
        drawn = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1}
    return SamplingParams(
        max_tokens=job.max_tokens,
        min_tokens=job.min_tokens,
        stop_token_ids=job.stop_token_ids,
        n=job.n,
        seed=job.seed,
        priority=job.priority,
        cache_salt=job.salt,
        lora=job.lora,
        ignore_eos=True,
        logprobs=None if config.deterministic else N_TOP,
        prompt_logprobs=1 if config.prompt_logprobs and job.prompt else None,
        **drawn,
    )


# ---- alone ----


def alone(config: Config, model: Path, jobs: Sequence[Job]) -> tuple[dict[Job, list[Tokens]], int]:
    """Answer each request alone, in an engine that shares nothing.

    Returns: the token ids of the samples of each request (deterministic mode only), and the bytes of a block
        in every group.
    """
    from pyvelo import LLM

    settings = _settings(config, model)
    with LLM(model, n_threads=1, kv_cache_bytes=_bytes_alone(config), prefix_cache=False, **settings) as llm:

        @cache
        def answer(prompt: Tokens, params: SamplingParams) -> list[Tokens]:
            (output,) = llm.generate([prompt], params)
            return [sample.token_ids for sample in output.outputs]

        size = llm.stats().block_bytes * llm.stats().n_groups
        if not config.deterministic:
            return {}, size
        return {job: answer(job.prompt, params_of(config, job)) for job in jobs}, size


def _bytes_alone(config: Config) -> int:
    """Return bytes of a pool for any sequence and a last block of each sample. Audits fill it."""
    tokens = N_CTX + 256 + config.n * config.block_size
    return 4 * LAYERS * tokens * config.kv_heads * (config.key_dim + config.head_dim)  # at most f32


def _settings(config: Config, model: Path) -> dict[str, Any]:
    return {
        "lora": {name: model.with_name(f"{name}.gguf") for name in adapters_of(config)},
        "kv_type": config.kv_types,
        "block_size": config.block_size,
        "n_ctx": N_CTX,
        "deterministic": config.deterministic,
    }


# ---- together ----


@dataclass(frozen=True)
class Answers:
    """Outputs of the requests (None: cancelled), and of the texts of each talk."""

    requests: list[RequestOutput | None]
    talks: list[list[RequestOutput]]


async def together(config: Config, model: Path, jobs: list[Job], talks: list[Talk], pool: int) -> Answers:
    """Run all requests and sessions at once. Raises AssertionError if anything is held in the end."""
    from pyvelo import AsyncLLM

    async with AsyncLLM(
        model,
        n_threads=config.threads,
        kv_cache_bytes=pool,
        swap_bytes=pool // 2 if config.swap else 0,
        max_batch_tokens=max(config.batch_tokens, config.batch_seqs),
        max_num_seqs=config.batch_seqs,
        prefix_cache=config.prefix_cache,
        **_settings(config, model),
    ) as llm:
        requests, said = await asyncio.gather(
            asyncio.gather(*(_ask(llm, config, job) for job in jobs)),
            asyncio.gather(*(_talk(llm, config, talk) for talk in talks)),
        )
        await _all_free(llm)
    return Answers(requests, said)


async def _ask(llm: AsyncLLM, config: Config, job: Job) -> RequestOutput | None:
    params = params_of(config, job)
    if not job.cancelled:
        return (await llm.generate([job.prompt], params))[0]
    seen = 0
    async for _ in llm.stream(job.prompt, params):
        seen += 1
        if seen > job.seed % 3:
            break
    return None


async def _talk(llm: AsyncLLM, config: Config, talk: Talk) -> list[RequestOutput]:
    async with await llm.session(talk.begin, lora=talk.lora) as session:
        await session.compute()
        twins = [await session.fork() for _ in talk.texts[1:]]
        return list(
            await asyncio.gather(
                *(_go_on(config, s, t, talk) for s, t in zip([session, *twins], talk.texts, strict=True))
            )
        )


async def _go_on(config: Config, session: Any, text: Tokens, talk: Talk) -> RequestOutput:
    async with session:
        await session.append(text)
        params = params_of(config, Job((), talk.max_tokens, lora=talk.lora))
        output: RequestOutput = await session.generate(params)
        return output


async def _all_free(llm: AsyncLLM) -> None:
    for _ in range(100):  # a cancelled request ends with the running step
        stats = await llm.stats()
        held = {
            "blocks": stats.blocks_used,
            "reserved": stats.blocks_reserved,
            "swap blocks": stats.swap_blocks_used,
            "running": stats.running,
            "waiting": stats.waiting,
            "sessions": stats.idle,
        }
        if not any(held.values()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"held when all have ended: {held}")


# ---- findings ----


def findings(config: Config) -> list[str]:
    """Run one configuration and return what is wrong with it, a sentence each."""
    from pyvelo.errors import VeloError

    with tempfile.TemporaryDirectory() as folder, _environment(VELO_DEBUG="1" if config.audit else "0"):
        model = Path(folder, "model.gguf")
        write_model(shape_of(config), model, type_name=config.weights, seed=config.seed)
        write_adapters(config, model)
        jobs, talks = jobs_of(config), talks_of(config)
        told = [job for talk in talks for job in talk.jobs()]
        try:
            expected, block_bytes = alone(config, model, [*jobs, *told])
            pool = _pool_blocks(config, jobs, talks) * block_bytes
            answers = asyncio.run(together(config, model, jobs, talks, pool))
        except (VeloError, AssertionError) as error:
            return [f"{type(error).__name__}: {error}"]
        if config.deterministic:
            return list(_differences(expected, jobs, told, answers))
        asked = zip(jobs, answers.requests, strict=True)  # the contiguous path has no adapters
        outputs = [output for job, output in asked if output is not None and not job.lora]
        spoken = zip(talks, answers.talks, strict=True)
        said = [output for talk, told in spoken if not talk.lora for output in told]
        # the contiguous path computes each alone: the first and the last ones are enough
        compared = [*outputs[:1], *outputs[1:][-1:], *said[:1], *said[1:][-1:]]
        return too_far(config, model, [output for output in compared if output.prompt_token_ids])


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _pool_blocks(config: Config, jobs: list[Job], talks: list[Talk]) -> int:
    """Return the number of blocks for all at once, for a third of that, or for the longest alone."""
    lengths = [len(job.prompt) + job.max_tokens for job in jobs for _ in range(job.n)]
    lengths += [len(job.prompt) + job.max_tokens for talk in talks for job in talk.jobs()]
    blocks = [-(-length // config.block_size) for length in lengths]
    least = -(-max(lengths) // 256) * 256 // config.block_size  # a pool is a multiple of 256 tokens
    wanted = {"roomy": sum(blocks) + 8, "tight": sum(blocks) // 3, "least": least}[config.pool]
    return -(-max(least, wanted) * config.block_size // 256) * 256 // config.block_size


def _differences(
    expected: dict[Job, list[Tokens]], jobs: list[Job], told: list[Job], answers: Answers
) -> Iterator[str]:
    said = [*answers.requests, *(output for talk in answers.talks for output in talk)]
    for number, (job, output) in enumerate(zip([*jobs, *told], said, strict=True)):
        if output is None:
            continue
        got = [sample.token_ids for sample in output.outputs]
        if got != expected[job]:
            what = f"request {number}" if number < len(jobs) else f"text {number - len(jobs)} of the sessions"
            yield f"{what} of {len(job.prompt)} tokens: {got} where it says {expected[job]} alone"


def main() -> None:
    """Answer every line of standard input."""
    answers = os.fdopen(os.dup(1), "w")  # the output of libraries goes elsewhere
    os.dup2(2, 1)
    for line in sys.stdin:
        found = findings(Config(**json.loads(line)))
        answers.write(json.dumps(found) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
