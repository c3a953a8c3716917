"""The step loop, and what runs steps or feeds it: an emulated device, a torch model, an HTTP
server."""
