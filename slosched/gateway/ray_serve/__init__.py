"""slosched servers as a Ray Serve application: one address, many machines, the fleet's routers.

- `front.Front`: the deployment that clients reach; it hands requests on and answers back.
- `request_router.FleetRouter`: Ray Serve's request router, which asks one of `fleet/routers`.
- `replica.EngineReplica`: the deployment whose replicas run a `slosched serve` each.
- `deploy.serve_application`: starts all of it and serves until a signal arrives.

It needs the extra `ray`.
"""
