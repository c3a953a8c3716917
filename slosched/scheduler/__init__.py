"""The Scheduler: queues, the check of a policy's plan, and carrying it out."""

from slosched.scheduler.prompt_lookup import PromptLookup
from slosched.scheduler.scheduler import Scheduler
from slosched.scheduler.speculation import Proposer, Speculation

__all__ = ["PromptLookup", "Proposer", "Scheduler", "Speculation"]
