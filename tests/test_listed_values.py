"""Which values of short results, of noise and of schemas stay after a compaction."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import random
import uuid
from typing import Any

import pytest
from google.genai import types

from contextguard_adk import Pipeline, SlidingWindow, Threshold
from contextguard_adk.strategies import Strategy
from contextguard_adk.testing import SimulatedLlm
from tests.builders import model, user
from tests.chats import DEMAND, guarded_chat, seed, words

HEADING = "[Values of what was left out"


def call(name: str, args: dict[str, Any], result: Any) -> list[types.Content]:
    """A call of a tool and its result."""
    asked = types.FunctionCall(name=name, args=args)
    said = types.FunctionResponse(name=name, response=result)
    return [
        types.Content(role="model", parts=[types.Part(function_call=asked)]),
        types.Content(role="user", parts=[types.Part(function_response=said)]),
    ]


async def list_after(
    contents: list[types.Content], strategy: Strategy | None = None
) -> str:
    """The list of values in the request after these contents are left out."""
    llm = SimulatedLlm(context_window=8_000, summary_replies=["All is well."])
    chat = guarded_chat(llm, strategy or Threshold(context_window=8_000, keep=0))
    await seed(chat, user("Hello."), *contents, state=DEMAND)
    await chat.say("And now?")
    return llm.requests[-1].text.partition(HEADING)[2].partition("\n[")[0]


SHORT = {
    "booking": {"booking": "BK-70431"},
    "receipt": {"result": "Paid. Receipt BK-70431"},
    "ticket": {"ticket": {"id": "BK-70431"}},
    "text": {"result": "BK-70431"},
    "mcp": {"content": [{"type": "text", "text": '{"ref": "BK-70431"}'}]},
}


@pytest.mark.parametrize("result", SHORT.values(), ids=SHORT)
async def test_the_value_of_a_short_result_is_listed(result: dict[str, Any]) -> None:
    """One short result among long talk has room for its value."""
    talk = [user(words(400)), model(words(400))]
    contents = [*talk, *call("book", {"room": "blue"}, result), *talk]
    assert "BK-70431" in await list_after(contents)


@pytest.mark.parametrize("make", [Threshold, SlidingWindow, Pipeline])
async def test_each_strategy_lists_the_values_of_short_results(
    make: type[Threshold] | type[SlidingWindow] | type[Pipeline],
) -> None:
    """Four bookings in a long chat are all named in its last request."""
    llm = SimulatedLlm(context_window=4_000, summary_replies=lambda _: "All is well.")
    chat = guarded_chat(llm, make(context_window=4_000))
    bookings = [call("book", {"n": n}, {"id": f"BK-7{n}431"}) for n in range(4)]
    talk = [[user(words(250)), model("I see.")] for _ in range(16)]
    await seed(chat, *itertools.chain(*talk[:2], *bookings, *talk[2:]))
    await chat.say("And now?")

    text = llm.requests[-1].text
    assert [n for n in range(4) if f"BK-7{n}431" not in text] == []


def make_noise(kind: str, seed_number: int) -> Any:
    """A field of some kilobytes that names nothing."""
    rng = random.Random(seed_number)
    encoded = base64.b64encode(rng.randbytes(3_000)).decode()
    lines = [encoded[begin : begin + 76] for begin in range(0, len(encoded), 76)]
    pairs = [[round(rng.uniform(-90, 90), 5) for _ in "xy"] for _ in range(150)]
    noise = {
        "base64": encoded,
        "base64 in lines": "\n".join(lines),
        "data address": f"data:image/png;base64,{encoded}",
        "hex": rng.randbytes(2_000).hex(),
        "dump": "\n".join(
            f"{n:08x}: {rng.randbytes(16).hex(' ', 2)}" for n in range(60)
        ),
        "embedding": [rng.uniform(-1, 1) for _ in range(300)],
        "vector as text": " ".join(f"{rng.uniform(-1, 1):.6f}" for _ in range(300)),
        "coordinates": pairs,
        "UUIDs": [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(80)],
        "hashes": [hashlib.sha256(rng.randbytes(9)).hexdigest() for _ in range(50)],
        "script": "".join(f"var a{rng.randrange(999)}=e.t{n};" for n in range(250)),
        "table of numbers": "\n".join(
            f"{rng.randrange(99999)},{n}.5" for n in range(300)
        ),
    }
    return noise[kind]


NOISE = [
    *("base64", "base64 in lines", "data address", "hex", "dump", "embedding"),
    *("vector as text", "coordinates", "UUIDs", "hashes", "script"),
    "table of numbers",
]


@pytest.mark.quick(
    "base64-fields",
    "base64 in lines-mcp",
    "hex-fields",
    "embedding-fields",
    "vector as text-fields",
    "UUIDs-fields",
    "hashes-fields",
    "script-mcp",
)
@pytest.mark.parametrize("is_mcp", [False, True], ids=["fields", "mcp"])
@pytest.mark.parametrize("kind", NOISE)
async def test_a_field_of_noise_leaves_room_for_the_ids_beside_it(
    kind: str, is_mcp: bool
) -> None:
    """Of eight records with noise, the ids of all are listed."""
    contents: list[types.Content] = []
    for number in range(8):
        noise = make_noise(kind, number)
        record = {"data": noise, "order": f"ORD-5{number}17", "about": words(30)}
        text = [{"type": "text", "text": json.dumps(record)}]
        contents += call(
            "fetch", {"n": number}, {"content": text} if is_mcp else record
        )

    listed = await list_after(contents)

    assert [n for n in range(8) if f"ORD-5{n}17" not in listed] == []


BLOBS = ["base64", "base64 in lines", "data address", "hex", "embedding"]


@pytest.mark.parametrize("kind", BLOBS)
async def test_no_piece_of_a_blob_is_a_value(kind: str) -> None:
    """Only the id in the sentence around it is one."""
    blob = make_noise(kind, 1)
    text = blob if isinstance(blob, str) else json.dumps(blob)
    result = {"result": f"The order ORD-5017 has this:\n{text}\n{words(200)}"}

    listed = await list_after(call("fetch", {"n": 1}, result))

    assert listed.splitlines()[1:] == ["- fetch(1): ORD-5017"]


DIGEST = hashlib.sha256(b"image").hexdigest()

IDS = [
    DIGEST,
    f"registry.example.com/shop/web@sha256:{DIGEST}",
    hashlib.sha1(b"commit").hexdigest(),
    "550e8400-e29b-41d4-a716-446655440000",
    "files/550e8400-e29b-41d4-a716-446655440000/report-7.pdf",
    "https://docs.example.com/d/1BxiMVs0XRA5nFMdKvBdBZjgmUUqptlbs74OgvE2upms/edit",
    "service-role/OrderProcessorLambdaRole2ForTheShopAndItsManyCustomers",
    "src/main/java/com/example/shop/orders/OrderProcessorFactoryBean2Impl.java",
]


@pytest.mark.parametrize("value", IDS)
async def test_a_long_id_in_prose_is_a_value(value: str) -> None:
    """Digests, UUIDs, paths and addresses are no blobs."""
    result = {"result": f"It is in {value} and {words(600)}"}
    listed = await list_after(call("find", {"n": 1}, result))
    assert value.rpartition("@")[2].removeprefix("sha256:") in listed


SCHEMAS: dict[str, Any] = {
    "statement": "CREATE TABLE parcels (\n  tracking text NOT NULL, -- the code\n"
    "  weight numeric(10, 2) DEFAULT 0,\n  PRIMARY KEY (tracking)\n);",
    "in quotes": 'create table if not exists "shop"."parcels" '
    '("tracking" TEXT, "weight" REAL)',
    "in backticks": "CREATE TABLE `parcels` (`tracking` int(11), `weight` int, "
    "KEY `k` (`weight`)) ENGINE=InnoDB",
    "in brackets": "CREATE TABLE [dbo].[parcels] ([tracking] INT, [weight] MONEY)",
    "foreign key": "CREATE TABLE stops (FOREIGN KEY (tracking) REFERENCES "
    "parcels(weight))",
    "change": "ALTER TABLE parcels ADD COLUMN tracking text;\n"
    "ALTER TABLE parcels RENAME COLUMN grams TO weight",
    "insertion": "INSERT INTO parcels (tracking, weight) VALUES ('a', 1)",
    "rows": [
        {"table_name": "parcels", "column_name": "tracking", "data_type": "text"},
        {"table_name": "parcels", "column_name": "weight", "data_type": "real"},
    ],
    "pragma": "Table: parcels\n0|tracking|TEXT|0||0\n1|weight|REAL|0||0",
    "printed rows": "Table: parcels\n"
    "[(0, 'tracking', 'TEXT', 0), (1, 'weight', 'REAL')]",
    "markdown": "Table: parcels\n\n| name | type |\n|---|---|\n| tracking | text |\n"
    "| `weight` | real |",
    "psql": ' Table "public.parcels"\n  Column  | Type | Nullable\n'
    "----------+------+---\n tracking | text | not null\n weight   | real |",
    "JSON schema": {
        "$defs": {"parcels": {}},
        "properties": {"tracking": {"type": "string"}, "weight": {"type": "number"}},
    },
    "map": {"tables": {"parcels": {"tracking": "text", "weight": "real"}}},
    "GraphQL": "type parcels {\n  tracking: ID!\n  weight(unit: Unit): Float\n}",
    "Protocol Buffers": "message parcels {\n  string tracking = 1;\n"
    "  int32 weight = 2;\n}",
    "TypeScript": "export interface parcels { tracking: string; weight?: number }",
    "data class": "@dataclass\n"
    "class parcels:\n    tracking: str\n    weight: float = 0",
}


@pytest.mark.quick(
    "statement-mcp",
    "in quotes-mcp",
    "in brackets-field",
    "foreign key-mcp",
    "insertion-field",
    "rows-mcp",
    "printed rows-field",
    "markdown-mcp",
    "JSON schema-field",
    "map-mcp",
    "Protocol Buffers-field",
    "TypeScript-mcp",
)
@pytest.mark.parametrize("is_mcp", [False, True], ids=["field", "mcp"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
async def test_the_names_of_a_schema_are_listed(schema: Any, is_mcp: bool) -> None:
    """Before the ids of newer results, under the call that has read the schema."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    result = {"content": [{"type": "text", "text": text}]} if is_mcp else {"as": schema}
    rows = [{"id": f"row-{number}", "text": words(20)} for number in range(100)]
    contents = [
        *call("get_schema", {}, result),
        *call("query", {"n": 1}, {"rows": rows}),
    ]

    lines = (await list_after(contents)).splitlines()

    [names] = [line for line in lines if line.startswith("- get_schema")]
    assert all(name in names for name in ("parcels", "tracking", "weight"))


async def test_plain_words_of_other_results_are_not_listed() -> None:
    """A word is a name of a schema only where a schema has one."""
    said = (
        "Please create a seat for two, ORD-5017. The type is text, the class is | so."
    )
    listed = await list_after(call("ask", {"n": 1}, {"result": f"{said} {words(300)}"}))
    assert listed.splitlines()[1:] == ["- ask(1): ORD-5017"]
