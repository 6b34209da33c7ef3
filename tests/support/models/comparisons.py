"""Functions that compare two models: tensors by name, and the arguments of hooks."""

import torch


def tensors_of(outputs):
    """Return all tensors that a model of `transformers` returns, with hidden states and weights, by name."""
    found = {}
    for name, value in outputs.items():
        parts = value if isinstance(value, tuple | list) else [value]
        found |= {f"{name} {index}": part for index, part in enumerate(parts) if part is not None}
    return found


def assert_equal(actual, expected, tolerance):
    """Compare tensors by name, relative to the largest number in each tensor."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, name
        error = (actual[name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
        assert error <= tolerance, (name, error)


def assert_hooks_see_the_same(source, ends, retrofit, x):
    """Compare what hooks get before and after a retrofit, for modules whose names end in one of these texts.

    Return the retrofitted model, and what the hooks got before the retrofit, by name.
    """
    seen = []
    for name, part in source.named_modules():
        if name.endswith(ends):
            part.register_forward_hook(lambda _module, _args, output, name=name: seen.append((name, output)))
    model = retrofit(source)
    source(x)
    expected = list(seen)
    seen.clear()
    model(x)
    assert [name for name, _ in seen] == [name for name, _ in expected]
    for (_, ours), (_, theirs) in zip(seen, expected, strict=True):
        (ours, *our_rest), (theirs, *their_rest) = (
            part if isinstance(part, tuple) else (part,) for part in (ours, theirs)
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        # Besides tensors, attention returns None, or the numbers of rows and columns.
        assert [part and [*part] for part in our_rest] == [part and [*part] for part in their_rest]
    return model, dict(expected)
