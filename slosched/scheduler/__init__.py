"""The Scheduler: queues, the check of a policy's plan, and carrying it out."""

from slosched.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
