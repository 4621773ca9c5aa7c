import gc
import os
import signal
import zlib
from collections.abc import Iterator

import pytest
import torch
from _pytest.runner import runtestprotocol
from hypothesis import settings

from tests.pool import NOT_CONNECTED, Pool

# The same examples in every run, and no time limits on a busy machine.
settings.register_profile("fjoin", max_examples=60, deadline=None, derandomize=True, database=None)
settings.load_profile("fjoin")

# A shell that starts a program in the background has it ignore this signal, and so would all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """As `torch.manual_seed(0)`, which keeps a traceback for each kind of device that is not used yet."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real ranks: `pool.run(n, function, *args)`."""
    workers = Pool()
    yield workers
    workers.close()


ON_GPUS = [pytest.mark.nccl, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and NCCL")]


@pytest.fixture(
    scope="module",
    params=[
        "gloo",
        pytest.param("cpu:gloo,cuda:nccl", marks=ON_GPUS),
        pytest.param("nccl", marks=ON_GPUS),  # without a backend for messages from the host
    ],
)
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[str, Pool]]:
    """A device, and real ranks for its tensors: the CPU with gloo, and GPUs with NCCL. One GPU will do (see pool.py)."""
    if request.param == "gloo":
        yield "cpu", request.getfixturevalue("pool")
        return
    workers = Pool(request.param)
    yield "cuda", workers
    workers.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Nothing that is collected is garbage."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


def pytest_runtest_protocol(item: pytest.Function, nextitem: pytest.Item | None) -> bool:
    """Run a test again, up to twice, whose ranks gloo has failed to connect."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for _ in range(2):
        if any(report.failed and NOT_CONNECTED in f"{report.longrepr} {report.sections}" for report in reports):
            item._initrequest()
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the long tables whole")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs another transport; without --long also the long tables, and most of what is to be sampled.

    Tests that are named, by -k, by -m nccl or by their paths with "::", are run whole.
    """
    named = (
        bool(config.option.keyword) or config.option.markexpr == "nccl" or any("::" in str(arg) for arg in config.args)
    )
    long, gloo = config.getoption("--long") or named, os.environ.get("FJOIN_TRANSPORT", "gloo") == "gloo"

    def is_out(item: pytest.Item) -> bool:
        sample = item.get_closest_marker("sample")
        # The checksum varies all parameters of a table, where a stride might always meet the same value of one.
        is_long = "long" in item.keywords or bool(sample and zlib.crc32(item.name.encode()) % sample.args[0])
        return (is_long and not long) or ("gloo" in item.keywords and not gloo)

    config.hook.pytest_deselected(items=[item for item in items if is_out(item)])
    items[:] = [item for item in items if not is_out(item)]
