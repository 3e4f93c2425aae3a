"""Parity holds over both transports: memory shared between the ranks of a machine, and the group's collectives."""

import pytest


@pytest.fixture(params=["shared_memory", "c10d"])
def transport(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment that chooses a transport."""
    return {"CADENZA_SHARED_MEMORY": "1" if request.param == "shared_memory" else "0"}
