"""The step loop, and what surrounds it: an emulated device, a torch model, an HTTP server."""
