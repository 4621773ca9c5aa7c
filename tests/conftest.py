from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Real ranks: `pool.run(n, function, *args)`."""
    workers = Pool()
    yield workers
    workers.close()
