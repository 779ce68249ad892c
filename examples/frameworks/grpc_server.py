"""gRPC: a whole program that checks itself. docs/frameworks.md explains it."""

from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelguard import batched, guard
from modelguard.frameworks import grpc as modelguard_grpc


class Model:
    """Stands for a real model."""

    def __call__(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]


nlp = guard(Model, reload_on=None, name="nlp")


@batched(max_size=32)
@nlp
def count(model: Model, texts: list[str]) -> list[int]:
    return model(texts)


def count_words(request: bytes, context: grpc.ServicerContext) -> bytes:
    return str(count(request.decode())).encode()


class Health(health_pb2_grpc.HealthServicer):
    """Readiness, as Kubernetes' gRPC probes ask for it."""

    def Check(self, request: object, context: grpc.ServicerContext) -> health_pb2.HealthCheckResponse:
        ready = nlp.ready and count.ready
        return health_pb2.HealthCheckResponse(status=1 if ready else 2)  # SERVING, NOT_SERVING


server = grpc.server(ThreadPoolExecutor(64), interceptors=[modelguard_grpc.interceptor(deadline="2s")])
method = grpc.unary_unary_rpc_method_handler(count_words)
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("Words", {"Count": method})])
health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
port = server.add_insecure_port("127.0.0.1:0")


with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    ask = channel.unary_unary("/Words/Count")
    with nlp, count:
        server.start()
        assert ask(b"two words", timeout=60) == b"2"
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1
    try:
        ask(b"two words", timeout=60)
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata())
    assert health.Check(health_pb2.HealthCheckRequest()).status == 2
    server.stop(grace=2).wait()
