"""A front for several OpenAI-compatible servers, with the routers of the simulated fleet.

gateway = Gateway(["http://a:8000", "http://b:8000"], "least_requests")
serve_gateway(gateway, port=8080)
"""

from slosched.gateway.config import GatewayConfig
from slosched.gateway.gateway import Gateway
from slosched.gateway.run import serve_gateway

__all__ = ["Gateway", "GatewayConfig", "serve_gateway"]
