"""What every store must do, as a test class to inherit.

    class TestMyStore(StoreSuite):
        @pytest.fixture
        def store(self): ...                      # a fresh, empty store
        def raw_put(self, store, key, data): ...  # past the store: straight into the file system, bucket, dictionary
        def raw_get(self, store, key): ...        # the bytes, or None

The raw hooks bypass the store under test, so no read is checked by the code that wrote it or the other way round.
"""

from __future__ import annotations

from torch_delta.testing.store_reading import ReadingTests
from torch_delta.testing.store_writing import WritingTests


class StoreSuite(ReadingTests, WritingTests):
    """All conformance tests of a store; `store_hooks.StoreHooks` lists what a subclass provides."""
