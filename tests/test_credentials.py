"""The list of values has business data, and neither credentials nor cards."""

from __future__ import annotations

from typing import Any

import pytest
from google.genai import types

from contextguard_adk import Threshold
from contextguard_adk.testing import SimulatedLlm
from tests.builders import call, response
from tests.chats import DEMAND, guarded_chat, seed, words

HEADING = "[Values of what was left out"

LISTED: list[tuple[Any, str]] = [
    ({"authorization": {"id": "PA-2024-8813", "status": "approved"}}, "PA-2024-8813"),
    ({"authorization": "PA-2024-8814"}, "PA-2024-8814"),
    ({"authorization_number": "A-77123"}, "A-77123"),
    ({"preauthorization": {"reference": "PRE-5512"}}, "PRE-5512"),
    ({"authorizedBy": "dr.lee_4"}, "dr.lee_4"),
    ({"auth_code": "AB12"}, "AB12"),
    ({"auth": {"order": "A-1"}}, "A-1"),
    ({"token": {"symbol": "WSTX", "address": "0x9f8A7c11"}}, "0x9f8A7c11"),
    ({"token": "USDC.e"}, "USDC.e"),
    ({"token": "Q-0113"}, "Q-0113"),
    (
        {"token": "0x5FbDB2315678afecb367f032d93F642f64180aa3"},
        "0x5FbDB2315678afecb367f032d93F642f64180aa3",
    ),
    (
        {"token": {"address": "EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v"}},
        "EPjFWdd5AufqSSqeM2qN1xzybapC8G4wEGGkZwyTDt1v",
    ),
    ({"next_page_token": "CAE8121"}, "CAE8121"),
    ({"nextPageToken": "CAEaHgoQc2Nyb2xsOjIwMjQ2"}, "CAEaHgoQc2Nyb2xsOjIwMjQ2"),
    ({"nextToken": "p2-x81"}, "p2-x81"),
    ({"cursor": "b2Zmc2V0OjEwMDAwMDAwMDAwQQ"}, "b2Zmc2V0OjEwMDAwMDAwMDAwQQ"),
    ({"token_count": 8231}, "8231"),
    ({"tokens": 1234}, "1234"),
    ({"secrets": 5512}, "5512"),
    ({"session_id": "sess-8842"}, "sess-8842"),
    ({"primary_key": "cust_9911"}, "cust_9911"),
    ({"foreign_key": "ord_9912"}, "ord_9912"),
    ({"key": "ENG-1234"}, "ENG-1234"),
    ({"s3": {"key": "a/b/9f8a.pdf"}}, "a/b/9f8a.pdf"),
    ({"constraint": "pk_orders"}, "pk_orders"),
    ({"secret_santa": "mia_li_36"}, "mia_li_36"),
    ({"secret": {"menu_item": "SM-11"}}, "SM-11"),
    ({"cookie_policy": "CP-2024-3"}, "CP-2024-3"),
    ({"cookie": {"sku": "CK-100"}}, "CK-100"),
    ({"credential": {"id": "CRED-881", "degree": "BSC-14"}}, "CRED-881"),
    ({"password": {"policy_id": "pp-31", "min_length": 8}}, "pp-31"),
    ({"password_policy": "pp_32"}, "pp_32"),
    ({"boarding_pass": "lh-400-12a"}, "lh-400-12a"),
    ({"pwd": "/home/mia/app1"}, "/home/mia/app1"),
    ({"locale": "sk-SK"}, "sk-SK"),
    ({"imei": "356938035643809"}, "356938035643809"),
    ({"phone": {"id": 356938035643809}}, "356938035643809"),
    ({"iccid": "8949200000000000012"}, "8949200000000000012"),
    ({"order_id": "4000000000000010002"}, "4000000000000010002"),
    ({"tracking": "4111111111111111"}, "4111111111111111"),
    ({"invoice_number": 5555555555554444}, "5555555555554444"),
    ({"run": "9876543210123452"}, "9876543210123452"),
    ({"authorization": '{"id": "PA-2024-8815"}'}, "PA-2024-8815"),
    ("The device has the IMEI 356938035643809.", "356938035643809"),
    ("authorization: PA-2024-8816, granted", "PA-2024-8816"),
    ("Prior authorization PA-2024-8817 is for token ORD-2024-11.", "ORD-2024-11"),
    ('"token": "WSTX-2", "next_page_token": "CAE81"', "WSTX-2"),
    ("secret_santa: mia_li_37", "mia_li_37"),
    ("token_count: 8232", "8232"),
    ("Key: ENG-1235", "ENG-1235"),
]
"""Results of a tool, and the value of each that the next call may need."""

HIDDEN: list[tuple[Any, str]] = [
    ({"password": "hunter2"}, "hunter2"),
    ({"password": 739112}, "739112"),
    ({"passwd": "ab-1"}, "ab-1"),
    ({"DB_PWD": "PA-2024"}, "PA-2024"),
    ({"db_pass": "hunter3"}, "hunter3"),
    ({"password_hash": "5f4dcc3b5a"}, "5f4dcc3b5a"),
    ({"passwords": {"ann": "hunter4"}}, "hunter4"),
    ({"password": {"value": "hunter5"}}, "hunter5"),
    ({"user": {"name": "ann", "login": {"password": "hunter6"}}}, "hunter6"),
    ({"client_secret": "x-91"}, "x-91"),
    ({"clientSecret": "x-92"}, "x-92"),
    ({"secret": "hunter7"}, "hunter7"),
    ({"api_key": "PA-2025"}, "PA-2025"),
    ({"x-api-key": "k-9921"}, "k-9921"),
    ({"api_keys": ["k-9922", "k-9923"]}, "k-9923"),
    ({"private_key": "MIIE9"}, "MIIE9"),
    ({"refresh_token": "r-771"}, "r-771"),
    ({"accessToken": "r-772"}, "r-772"),
    ({"access_tokens": ["r-777"]}, "r-777"),
    ({"id_token": "r-773"}, "r-773"),
    ({"GITLAB_CI_TOKEN": "r-774"}, "r-774"),
    ({"token": "9f8a7c11d0e4b2a69f8a7c11"}, "9f8a7c11d0e4b2a69f8a7c11"),
    (
        {"token": "550e8400-e29b-41d4-a716-446655440000"},
        "550e8400-e29b-41d4-a716-446655440000",
    ),
    ({"token": {"value": "tok_9f8a7c11d0e4"}}, "tok_9f8a7c11d0e4"),
    ({"auth": {"token": "9f8a7c11d0e4b2a6"}}, "9f8a7c11d0e4b2a6"),
    ({"key": "9f8a7c11d0e4b2a69f8a7c12"}, "9f8a7c11d0e4b2a69f8a7c12"),
    ({"authorization": "Basic dXNlcjpwYXNz"}, "dXNlcjpwYXNz"),
    ({"headers": {"Authorization": "Bearer abc_1234"}}, "abc_1234"),
    ({"authorization": {"id": "ghp_a8Fk29dkE0smA8Fk29dk"}}, "ghp_a8Fk29dkE0sm"),
    ({"note": "sk-proj-a8Fk29dkE0smA8Fk"}, "sk-proj-a8Fk29"),
    ({"session_cookie": "sid_ab12"}, "sid_ab12"),
    ({"cookies": {"session_id": "ab12cd35"}}, "ab12cd35"),
    ({"credentials": {"login": "ann", "pw": "hunter8"}}, "hunter8"),
    ({"env": [{"name": "DB_PASSWORD", "value": "hunter9"}]}, "hunter9"),
    ({"dsn": "postgres://mia:hunter10@db.example.com/shop"}, "hunter10"),
    ({"token": "ab12-cd34-ef56-gh78"}, "ab12-cd34"),
    ({"cvv": 1237}, "1237"),
    ({"paid_with": "6759-6498-2643-8453"}, "8453"),
    ({"cc": 6759649826438453}, "6759649826438453"),
    ({"number": "4111111111111111"}, "4111111111111111"),
    ({"amount": 378282246310005}, "378282246310005"),
    ({"card": {"id": "5555555555554444"}}, "5555555555554444"),
    ({"pan": "9876543210123452"}, "9876543210123452"),
    ({"order": "4111 1111 1111 1111"}, "1111"),
    ({"credentials": '{"password": "hunter11"}'}, "hunter11"),
    ("export API_KEY=k-9924", "k-9924"),
    ("password: hunter12", "hunter12"),
    ("The API key: k-9925", "k-9925"),
    ('Found "token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIi"', "eyJhbGciOiJIUzI1NiJ9"),
    ("curl -H 'Authorization: Basic dXNlcjpwYXN0' x", "dXNlcjpwYXN0"),
    ("curl -H 'X-Api-Key: k-9926' x", "k-9926"),
    ("GITHUB_TOKEN=r-775", "r-775"),
    ("deploy --token r-776", "r-776"),
    ('Got "secrets": {"password": "hunter13"}', "hunter13"),
    ("token: password=hunter14", "hunter14"),
    ("private_key: -----BEGIN KEY-----\nMIIEa91/x\n-----END KEY-----", "MIIEa91"),
    ("Set-Cookie: sid=ab12cd36; Path=/", "ab12cd36"),
    ("card 4012 8888 8888 1881", "1881"),
    ("<password>hunter17</password>", "hunter17"),
    ("password: |\n  hunter18", "hunter18"),
    ("card 4012\u00a08888\u00a08888\u00a01881", "1881"),
    # JSON that was cut.
    ('{"body": "{\\"password\\": \\"hunter15\\", ', "hunter15"),
    ({"secrets": {"fields": ["hunter16"]}}, "hunter16"),
]
"""Results of a tool, and the credential or the number of a card in each."""


async def list_values(results: list[Any], *, as_arguments: bool = False) -> str:
    """The values and lines after a compaction of these results, by a real runner."""
    contents: list[types.Content] = []
    for number, result in enumerate(results):
        answer = {"row": f"row-{number:03}", "found": result, "text": words(60)}
        arguments = {"about": result} if as_arguments else {}
        contents.append(call("fetch", str(number), **arguments))
        contents.append(response("fetch", answer, str(number)))

    summary = "## Current State\nThe agent has read many records, one after the other."
    llm = SimulatedLlm(summary_replies=[summary])
    chat = guarded_chat(llm, Threshold(context_window=200_000, keep=0))
    await seed(chat, *contents, state=DEMAND)
    await chat.say("And now?")

    text = llm.requests[-1].text
    assert HEADING in text
    return text.partition(HEADING)[2]


async def test_business_data_is_listed_where_its_name_is_like_a_secrets() -> None:
    """Only name and form together make a credential."""
    listed = await list_values([result for result, _value in LISTED])
    assert [value for _result, value in LISTED if value not in listed] == []


@pytest.mark.parametrize("as_arguments", [False, True])
async def test_secrets_are_not_listed(as_arguments: bool) -> None:
    """Neither as values of results, nor in the arguments that name a call."""
    results = [result for result, _secret in HIDDEN]
    listed = await list_values(results, as_arguments=as_arguments)
    rows = [f"row-{number:03}" for number in range(len(HIDDEN))]
    assert [row for row in rows if row not in listed] == []
    assert [secret for _result, secret in HIDDEN if secret in listed] == []
