"""An object in a bucket (S3, MinIO, Ceph, R2), by its ETag: a program that checks itself, for docs/recipes.md."""

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer
from stand_ins import Model, wait_until

from modelguard import Changed, Loaded, Swap, guard

storage = ThreadedMotoServer("127.0.0.1", port=0)
storage.start()
host, port = storage.get_host_and_port()
bucket = boto3.client(
    "s3",
    config=Config(connect_timeout=2, read_timeout=5, retries={"total_max_attempts": 1}),
    endpoint_url=f"http://{host}:{port}",  # this and what follows is for the test alone
    region_name="us-east-1",
    aws_access_key_id="test",
    aws_secret_access_key="test",
)
bucket.create_bucket(Bucket="models")
bucket.put_object(Bucket="models", Key="nlp.bin", Body=b"the first")


def object_etag() -> str:
    return bucket.head_object(Bucket="models", Key="nlp.bin")["ETag"]


def load_object() -> Loaded[Model]:
    found = bucket.get_object(Bucket="models", Key="nlp.bin")  # the content and its ETag, by one request
    return Loaded(Model(found["Body"].read()), version=found["ETag"])


nlp = guard(load_object, reload_on=Changed(object_etag, every="200ms"), swap=Swap(defer=0), name="nlp")
with nlp:
    first = nlp.version
    bucket.put_object(Bucket="models", Key="nlp.bin", Body=b"the second")
    wait_until(lambda: nlp.version != first)
    with nlp.lease() as model:
        assert model("hello") == "hello, said the second"
storage.stop()
