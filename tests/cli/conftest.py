"""The servers of the store tests, for commands that are tried on a bucket."""

from tests.store.hubs import hub, hub_home, hub_url, running_hub  # noqa: F401 - fixtures
from tests.store.servers import seaweed  # noqa: F401 - a fixture
