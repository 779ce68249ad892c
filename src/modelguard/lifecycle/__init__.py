"""When a model is replaced, and how: policies, generations, leases, the guard, the pool."""
