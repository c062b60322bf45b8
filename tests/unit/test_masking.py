"""Secrets stay out of what is kept and shown, and what is no secret stays in."""

from typing import Any

import pytest

from tokenmill.masking import MASK, is_secret, mask_args, mask_env, mask_url, mask_words

SECRET = "hush-1234"


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN_2", "OPENAI_API_KEY", "OPENAI_APIKEY", "MY_KEY"),
        *("AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "BASIC_AUTH", "AUTH"),
        *("api-key", "api_key", "admin-api-key", "hf-token", "ssl-keyfile-password", "token", "key"),
    ],
)
def test_names_of_secrets_are_known(name: str) -> None:
    assert is_secret(name)
    assert is_secret(name.lower())


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "CUDA_VISIBLE_DEVICES", "HF_HOME", "VLLM_CACHE_ROOT", "OMP_NUM_THREADS", "KEYS"),
        *("max-total-tokens", "max-prefill-tokens", "max-num-batched-tokens", "tokenizer-path", "tokenizer-mode"),
        *("skip-tokenizer-init", "speculative-num-draft-tokens", "author", "routing-key-policy", "monkey"),
        *("long-prefill-token-threshold", "dbo-decode-token-threshold", "return-tokens-as-token-ids", "pad-token-id"),
        "speculative-token-map",
    ],
)
def test_flags_and_variables_of_engines_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://user:{SECRET}@proxy:3128", "http://***@proxy:3128"),
        (f"postgres+psycopg://{SECRET}@db/name?x=1", "postgres+psycopg://***@db/name?x=1"),
        (f"http://user:p@{SECRET}@proxy", "http://***@proxy"),
        (f"http://a:{SECRET}@b,https://c:{SECRET}@d/e", "http://***@b,https://***@d/e"),
        ("http://127.0.0.1:8000/a@b", "http://127.0.0.1:8000/a@b"),
        ("somebody@example.org", "somebody@example.org"),
        ("", ""),
    ],
)
def test_a_url_is_shown_without_its_user_and_password(text: str, shown: str) -> None:
    assert mask_url(text) == shown


def test_variables_keep_their_names_and_what_is_no_secret() -> None:
    env = {"HF_TOKEN": SECRET, "HTTPS_PROXY": f"http://u:{SECRET}@p:1", "OMP_NUM_THREADS": "4"}
    assert mask_env(env) == {"HF_TOKEN": MASK, "HTTPS_PROXY": "http://***@p:1", "OMP_NUM_THREADS": "4"}


def test_arguments_are_masked_however_deep_they_stand() -> None:
    args: dict[str, Any] = {
        "api-key": [SECRET, SECRET],
        "max-tokens": 5,
        "flag": True,
        "kv-transfer-config": {"kv_role": "both", "extra": [{"password": SECRET}, 1.5, f"s3://k:{SECRET}@bucket"]},
    }
    shown = mask_args(args)
    assert SECRET not in str(shown)
    assert shown["kv-transfer-config"] == {"kv_role": "both", "extra": [{"password": MASK}, 1.5, "s3://***@bucket"]}
    assert (shown["max-tokens"], shown["flag"], shown["api-key"]) == (5, True, MASK)
    assert args["api-key"] == [SECRET, SECRET]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["serve", "--api-key", SECRET, "--port", "1"], ["serve", "--api-key", MASK, "--port", "1"]),
        (["serve", f"--token={SECRET}", "--max-tokens=5"], ["serve", f"--token={MASK}", "--max-tokens=5"]),
        (["serve", "-api_key", SECRET], ["serve", "-api_key", MASK]),
        (["serve", f"--db=http://u:{SECRET}@h/d"], ["serve", "--db=http://***@h/d"]),
        (["serve", "--api-key=a", "model"], ["serve", f"--api-key={MASK}", "model"]),
        (["env", f"HF_TOKEN={SECRET}", "A=1", "serve"], ["env", f"HF_TOKEN={MASK}", "A=1", "serve"]),
        (["docker", "run", "-e", f"HF_TOKEN={SECRET}", "i"], ["docker", "run", "-e", f"HF_TOKEN={MASK}", "i"]),
        (["docker", "run", "-e", "HF_TOKEN", "image"], ["docker", "run", "-e", "HF_TOKEN", "image"]),
        (["serve", "--port", "{port}", "--model", "{model}"], ["serve", "--port", "{port}", "--model", "{model}"]),
    ],
)
def test_a_command_is_shown_without_the_values_of_secrets(words: list[str], shown: list[str]) -> None:
    assert mask_words(words) == shown
