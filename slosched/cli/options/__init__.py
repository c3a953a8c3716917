"""Options that several commands share; each command takes those that it needs."""

from slosched.cli.options.memory import (
    KVOptions,
    PrefixCache,
    PrefixCacheEviction,
    PrefixHostTokens,
    PrefixHostWrites,
    prefix_host,
)
from slosched.cli.options.model import Format, ModelOptions
from slosched.cli.options.promises import PromiseOptions, TracePromiseOptions, UsualPromiseOptions
from slosched.cli.options.scheduling import LatencyModelName, LimitOptions, PolicyName
from slosched.cli.options.traces import Seed, TraceOptions, TraceSource
from slosched.cli.options.values import (
    Figures,
    OutDir,
    Seconds,
    ServerKey,
    check_heeded,
    check_other_file,
    check_two_files,
    collector_url,
    duration,
    figure,
    first_key,
    is_given,
    out_file,
    server_url,
    share,
    writable,
)

__all__ = [
    "Figures",
    "Format",
    "KVOptions",
    "LatencyModelName",
    "LimitOptions",
    "ModelOptions",
    "OutDir",
    "PolicyName",
    "PrefixCache",
    "PrefixCacheEviction",
    "PrefixHostTokens",
    "PrefixHostWrites",
    "PromiseOptions",
    "Seconds",
    "Seed",
    "ServerKey",
    "TraceOptions",
    "TracePromiseOptions",
    "TraceSource",
    "UsualPromiseOptions",
    "check_heeded",
    "check_other_file",
    "check_two_files",
    "collector_url",
    "duration",
    "figure",
    "first_key",
    "is_given",
    "out_file",
    "prefix_host",
    "server_url",
    "share",
    "writable",
]
