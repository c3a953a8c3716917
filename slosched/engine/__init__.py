"""The step loop and what it drives: a simulated device, a torch model, an HTTP server."""
