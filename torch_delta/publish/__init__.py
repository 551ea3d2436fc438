"""Changes of all ranks -> parts -> one commit per version, in the background and without collectives.

`attaching` holds the public line; `lineage` opens the stream, `publisher` is the training thread's side, `pipeline` is
each rank's background thread, `committer` rank 0's, `anchors` writes full copies, `keyvalue` and `coordination` are how
the ranks talk.
"""

from __future__ import annotations

from torch_delta.publish.attaching import attach, attach_source
from torch_delta.publish.publisher import Publisher

__all__ = ["Publisher", "attach", "attach_source"]
