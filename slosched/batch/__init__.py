"""The step in the making: policies build their plans with a `BatchBuilder`."""

from slosched.batch.account import largest_that_fits as largest_that_fits
from slosched.batch.builder import BatchBuilder as BatchBuilder
