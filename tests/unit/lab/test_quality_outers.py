"""The lab's own candidates: outer steps that no preset has, and Adam's moments after a round."""

from __future__ import annotations

import pytest
import torch
from lab.quality.inner import StackedAdamW
from lab.quality.model import SHAPES, Stack, new_model
from lab.quality.outers import DecayedAnchor, Restarted, outer_step
from lab.quality.training import Setting

from cadenza.outer import Outer, nesterov, sgd

GIVEN = {"outer_lr": 0.7, "outer_momentum": 0.8}


def played(outer: Outer, rounds: range, state: dict[str, torch.Tensor], anchor: torch.Tensor) -> torch.Tensor:
    for number in rounds:
        delta = torch.full_like(anchor, 0.1 * (number + 1))
        outer.update(anchor, delta, state, rounds=number, inner_lr=0.5)
    return anchor


def test_momentum_begins_anew_every_so_many_rounds() -> None:
    plain, restarted = nesterov(0.7, momentum=0.8), outer_step(GIVEN | {"restart_every": 2}, decay_of_a_round=0.1)
    assert isinstance(restarted, Restarted)
    start = torch.ones(3)
    ours = played(restarted, range(4), restarted.init(start), start.clone())
    wanted = played(plain, range(2), plain.init(start), start.clone())
    wanted = played(plain, range(2, 4), plain.init(start), wanted)
    assert torch.equal(ours, wanted)
    assert not torch.equal(ours, played(plain, range(4), plain.init(start), start.clone()))


def test_the_anchor_decays_by_what_a_round_of_inner_steps_would_take() -> None:
    outer = outer_step(GIVEN | {"anchor_decay": 2.0}, decay_of_a_round=0.1)
    assert isinstance(outer, DecayedAnchor)
    anchor, nothing = torch.ones(3), torch.zeros(3)
    outer.update(anchor, nothing, outer.init(anchor), rounds=0, inner_lr=0.5)
    torch.testing.assert_close(anchor, torch.full((3,), 1 - 2.0 * 0.1 * 0.5))


def test_a_setting_s_words_become_its_outer_step() -> None:
    def outer(**words: object) -> Outer:
        strategy = {"name": "diloco", "period": 30, **GIVEN, **words}
        setting = Setting(strategy, workers=4, batch=1, lr=8e-3, seed=1, size="35k", tokens=3000 * 4 * 64)
        return setting.build().levels[0].outer

    assert outer() == nesterov(0.7, momentum=0.8)
    assert outer(look_ahead=False) == sgd(0.7, momentum=0.8)
    decayed = outer(anchor_decay=1.0)
    assert isinstance(decayed, DecayedAnchor)
    assert decayed.rate == pytest.approx(30 / (3000 * 8e-3))


@pytest.mark.parametrize("kept", [(0.0, 1.0), (0.0, 0.0)])
def test_adam_forgets_as_much_as_it_is_told(kept: tuple[float, float]) -> None:
    stack = Stack(new_model(SHAPES["35k"], seed=1, qk_norm=False), SHAPES["35k"], 2)
    inner = StackedAdamW(stack, betas=(0.9, 0.99), weight_decay=0.0)
    plain = torch.nn.Parameter(stack.values.detach().clone())
    other = torch.optim.AdamW([plain], lr=0.01, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        stack.gradients.copy_(torch.randn(stack.gradients.shape, generator=generator))
        plain.grad = stack.gradients.clone()
        if step == 3:
            inner.forget(*kept)
            if kept == (0.0, 0.0):
                other.state.clear()
            else:
                other.state[plain]["exp_avg"].zero_()
        inner.step(0.01)
        other.step()
    torch.testing.assert_close(stack.values, plain, rtol=0, atol=0)
    assert inner.optimizers[1].state[next(stack.modules[1].parameters())]["exp_avg"].abs().sum() > 0
