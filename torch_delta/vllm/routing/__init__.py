"""Index writes into live parameters: probe, table, plan, write, undo, digests. Knows torch and numpy, not vLLM."""

from torch_delta.vllm.routing.live import LiveModel
from torch_delta.vllm.routing.plan import Cancelled, Plan, PlanSummary, check_summaries
from torch_delta.vllm.routing.reach import Reach
from torch_delta.vllm.routing.write import Undo

__all__ = ["Cancelled", "LiveModel", "Plan", "PlanSummary", "Reach", "Undo", "check_summaries"]
