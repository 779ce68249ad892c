"""The forms in which secrets stand in command lines, process titles and messages; ``{s}`` is the secret.

``WORDS``: command lines as lists of words; the secret may hold anything.
``TEXTS``: unquoted values in a text; the secret has no line breaks.
``QUOTED``: values in quotation marks; the secret has no quotation marks or backslashes, but may have line breaks.
``TOKENS``: values that end at a space; the secret has none.
``BLOCKS``: values over several lines.
"""

from __future__ import annotations

__all__ = ["BLOCKS", "FORMS", "QUOTED", "TEXTS", "TOKENS", "WORDS"]

_NAMES = (
    "password", "passwd", "PASSPHRASE", "DB_PW", "api_key", "api-key", "APIKEY", "SECRET_KEY", "client_secret",
    "AWS_SECRET_ACCESS_KEY", "hf_token", "ACCESS_TOKEN", "X-Amz-Signature", "sig", "SENTRY_DSN", "credentials",
    "GOOGLE_APPLICATION_CREDENTIALS", "private_key", "session", "cookie", "jwt", "webhook", "pin", "otp", "sas", "auth",
    "Authorization", "proxy-authorization", "connection_string", "salt", "bearer",
)  # fmt: skip

WORDS: tuple[tuple[str, ...], ...] = (
    *((f"--{name}={{s}}",) for name in _NAMES),
    *((f"--{name}", "{s}") for name in _NAMES),
    *((f"{name}={{s}}",) for name in _NAMES),
    ("-p", "{s}"),
    ("-p{s}",),
    ("-a", "{s}"),
    ("-u", "a:{s}"),
    ("-ua:{s}",),
    ("-U", "a:{s}"),
    ("--user", "a:{s}"),
    ("--user=a:{s}",),
    ("--proxy-user", "a:{s}"),
    ("--proxy-user=a:{s}",),
    ("-H", "Authorization: Bearer {s}"),
    ("-H", "Authorization: {s}"),
    ("-H", "X-Api-Key: {s}"),
    ("-H", "Cookie: id={s}"),
    ("--header=Authorization: Basic {s}",),
    ("-e", "TOKEN={s}"),
    ("--env=API_KEY={s}",),
    ("--set", "db.password={s}"),
    ("-o", "keyfile.password={s}"),
    ("--passin", "pass:{s}"),
    ("requirepass", "{s}"),
    ("user.token", "{s}"),
    ("--db", "postgres://me:{s}@host/db"),
    ("postgres://{s}@host",),
    ("mysql+pymysql://root:{s}@10.0.0.1:3306/x?charset=utf8",),
    ("https://x/?token={s}",),
    ("https://x/?a=1&sig={s}",),
    ("dbname=x password={s}",),
    ("Server=x;Password={s}",),
    ("sh -c PASSWORD={s}",),
    ("run --password {s}",),
    ("run -p {s}",),
    ("curl -u a:{s}",),
    ("bearer {s}",),
    ("<password>{s}</password>",),
)

TEXTS: tuple[str, ...] = (
    *(f"{name}={{s}}" for name in _NAMES[:12]),
    *(f"{name}: {{s}}" for name in _NAMES[:12]),
    *(f"app --{name} {{s}}" for name in _NAMES[:12]),
    "app -p {s}",
    "app -p{s}",
    "app -a {s}",
    "curl -u me:{s}",
    "curl --user me:{s}",
    "curl --user=me:{s}",
    "export TOKEN={s}",
    "before\nTOKEN = {s}\nafter",
    "ValueError: bad password: {s}",
    "could not connect to postgres://me:{s}@host/db",
    "Authorization: Digest username=x, response={s}",
    "Bearer {s}",
    "machine x login y password {s}",
    "secret => {s}",
    "token := {s}",
    "os.environ[TOKEN] = {s}",
    "AWS4-HMAC-SHA256 Credential=x, Signature={s}",
    "password:\n  {s}",
    "app --password \\\n  {s}",
)

QUOTED: tuple[str, ...] = (
    "password='{s}' next",
    'password="{s}" next',
    "{{'password': '{s}', 'user': 'x'}}",
    '{{"password": "{s}", "user": "x"}}',
    '{{\\"password\\": \\"{s}\\"}}',
    "{{'token': b'{s}'}}",
    "KEY = '''{s}'''",
    'KEY = """{s}"""',
    "KEY = ('{s}')",
    "KEY = ['{s}', '{s}']",
    "os.environ['TOKEN'] = '{s}'",
    "Settings(api_key='{s}', port=80)",
    "ALTER USER x PASSWORD '{s}'",
    "CREATE USER x IDENTIFIED BY '{s}'",
    "KEY: '{s}",
    "secret='a'\"{s}\"",
)

TOKENS: tuple[str, ...] = (
    "login as me:{s}@host failed",
    "<password>{s}</password> next",
    '<api_key type="x">{s}</api_key>',
    "hf_{s}",
    "ghp_{s}",
    "glpat-{s}",
    "sk-{s}",
    "xoxb-{s}",
    "eyJhbGciOi.{s}.{s}",
)

BLOCKS: tuple[str, ...] = (
    "-----BEGIN RSA PRIVATE KEY-----\n{s}\n-----END RSA PRIVATE KEY-----\n",
    "-----BEGIN PRIVATE KEY-----\n{s}",
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{s}\n{s}\n-----END OPENSSH PRIVATE KEY-----",
    "key: |\n  {s}\n  {s}\n",
    "password: >\n  {s}\n",
    "token = (\n  '{s}'\n  '{s}'\n)",
    '"keys": [\n "{s}",\n "{s}"\n]',
)

FORMS = (*WORDS, *TEXTS, *QUOTED, *TOKENS, *BLOCKS)
