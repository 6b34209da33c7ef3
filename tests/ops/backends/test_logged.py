"""Messages that PyTorch logs when it compiles an attention: none about the checkpoint inside."""

import logging

import pytest
import torch
from torch._logging import warning_once

from relvit.ops import AxisTables, RelativeTerms, make_grid, relative_attention


@pytest.mark.slow
def test_a_compiled_training_step_logs_nothing_of_checkpoints(caplog):
    query, table, grid = torch.randn(1, 2, 6, 8, requires_grad=True), torch.randn(3, 8), make_grid(2, 3)
    terms = RelativeTerms(key=AxisTables(table, table))
    attend = torch.compile(lambda query: relative_attention(query, query, query, terms, grid), backend="aot_eager")
    # PyTorch's loggers do not pass messages to the root logger, and PyTorch logs this warning once per process.
    log = logging.getLogger("torch._higher_order_ops.wrap")
    log.addHandler(caplog.handler)
    warning_once.cache_clear()
    try:
        attend(query).sum().backward()
        log.warning("something else")
    finally:
        log.removeHandler(caplog.handler)
    assert "context_fn" not in caplog.text
    assert "something else" in caplog.text
