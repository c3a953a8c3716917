"""An OpenAI-compatible server over the step loop.

worker = EngineWorker(Engine(scheduler, executor, MonotonicClock()))
app = build_app(worker, tokenizer, ServerConfig("my-model", max_model_len=8192))
serve(app, worker, port=8000)
"""

from slosched.engine.server.account import Reporter
from slosched.engine.server.adapters import Adapters
from slosched.engine.server.app import build_app
from slosched.engine.server.config import ServerConfig
from slosched.engine.server.run import (
    ServerStartError,
    ServerStoppedError,
    check_can_listen,
    serve,
    serve_in_thread,
)
from slosched.engine.server.tls import CertificateError, TLSFiles
from slosched.engine.server.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    NoTokenizer,
    Tokenizer,
)
from slosched.engine.server.traces import Traces
from slosched.engine.server.watchdog import StepLimit
from slosched.engine.server.worker import EngineWorker

__all__ = [
    "Adapters",
    "ByteTokenizer",
    "CertificateError",
    "EngineWorker",
    "HuggingFaceTokenizer",
    "NoTokenizer",
    "Reporter",
    "ServerConfig",
    "ServerStartError",
    "ServerStoppedError",
    "StepLimit",
    "TLSFiles",
    "Tokenizer",
    "Traces",
    "build_app",
    "check_can_listen",
    "serve",
    "serve_in_thread",
]
