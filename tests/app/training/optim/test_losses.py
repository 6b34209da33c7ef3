"""The ponder cost in training compared with steps computed by hand: its weight at each step, and its logged values."""

import pytest
import torch
from small_training import HALTING, Noise, Record, assert_close, build, train
from torch.nn.functional import cross_entropy

OPTIONS = {"opt": "momentum", "opt_kwargs": {"momentum": 0}, "lr": 0.1, "min_lr": 0.1, "warmup_epochs": 0}
OPTIONS |= {"weight_decay": 0, "label_smoothing": 0}


def test_the_loss_is_that_of_the_labels_and_the_weighted_cost():
    module, by_hand, data = build(**OPTIONS, **HALTING), build(**OPTIONS, **HALTING), Noise()
    record = Record(module)
    options = {"max_epochs": 2, "limit_train_batches": 4, "limit_val_batches": 0, "accumulate_grad_batches": 2}
    trainer = train(module, data, **options)
    net, costs, steps = by_hand.net.train(), [], 0
    for _ in range(2):
        costs.clear()
        for batch in range(4):
            rows = slice(4 * batch, 4 * batch + 4)
            # The weight rises linearly during the two steps of the first epoch, and is complete afterwards.
            weight = 0.5 * min(1, (steps + 1) / 3)
            out = net.ponder(data.images[rows])
            costs.append(out.cost.mean().item())
            loss = cross_entropy(out.logits, data.labels[rows]) + weight * out.cost.mean()
            (loss / 2).backward()
            if batch % 2:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter -= 0.1 * parameter.grad
                net.zero_grad()
                ours = record.weights[steps]
                assert_close(ours, dict(net.named_parameters()), atol=1e-5, rtol=1e-4)
                steps += 1
        assert 1 < sum(costs) / 4 < 4
    computed = trainer.lightning_module.step_metrics.compute()
    assert float(computed["train/ponder_cost"]) == pytest.approx(sum(costs) / 4, rel=1e-5)
