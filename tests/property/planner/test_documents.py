"""Documents round-trip byte for byte, and damaged ones are refused in one sentence."""

import json
from copy import deepcopy

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from meshwright.planner.schema.cluster import Cluster
from meshwright.planner.schema.errors import InputError
from meshwright.planner.schema.plan import Plan
from meshwright.planner.schema.profile import ModelProfile
from meshwright.planner.schema.record import Record, decode, encode

from tests.json_schemas import schema_files
from tests.strategies import clusters, plans, profiles

RECORDS = {
    Plan: plans(),
    ModelProfile: profiles(),
    Cluster: clusters(measured=True),
}
SCHEMA = {Plan: "plan.json", ModelProfile: "model_profile.json", Cluster: "cluster.json"}
cases = pytest.mark.parametrize("cls", RECORDS, ids=lambda c: c.__name__)

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=4),
    st.just([]),
    st.just({}),
    st.just([[[]]]),
)


@cases
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_round_trip_byte_for_byte(cls, data):
    record = data.draw(RECORDS[cls])
    written = encode(record)
    assert decode(cls, written) == record
    assert encode(decode(cls, written)) == written


@cases
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_valid_documents_satisfy_the_schema(cls, data):
    schema = json.loads(schema_files()[SCHEMA[cls]])
    document = json.loads(encode(data.draw(RECORDS[cls])))
    jsonschema.Draft202012Validator(schema).validate(document)


def attempt(cls: type[Record], damaged: bytes) -> None:
    """Reads what may be damaged: a valid record or an ``InputError`` of one line, nothing else."""
    try:
        record = decode(cls, damaged, "plan.json")
    except InputError as error:
        message = str(error)
    else:
        assert encode(decode(cls, encode(record))) == encode(record)
        return
    assert message.startswith("plan.json")
    assert "\n" not in message


def paths(node, here=()):
    """The path of every value in a document."""
    yield here
    children = node.items() if isinstance(node, dict) else ()
    for key, child in enumerate(node) if isinstance(node, list) else children:
        yield from paths(child, (*here, key))


@cases
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_hand_damaged_documents(cls, data):
    document = json.loads(encode(data.draw(RECORDS[cls])))
    for _ in range(data.draw(st.integers(1, 2))):
        document = damage(document, data)
    attempt(cls, json.dumps(document).encode("utf-8", "surrogatepass"))


def damage(document, data):
    """Replaces, removes, doubles or adds something somewhere."""
    path = data.draw(st.sampled_from(list(paths(document))))
    if not path:
        return deepcopy(data.draw(JUNK))
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    how = data.draw(st.sampled_from(("replace", "remove", "add")))
    if how == "replace":
        parent[path[-1]] = deepcopy(data.draw(JUNK))
    elif how == "remove":
        del parent[path[-1]]
    elif isinstance(parent, dict):
        parent[data.draw(st.text(max_size=3))] = deepcopy(data.draw(JUNK))
    else:
        parent.append(parent[path[-1]])
    return document


@cases
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_truncated_and_overwritten_bytes(cls, data):
    written = bytearray(encode(data.draw(RECORDS[cls])))
    start = data.draw(st.integers(0, len(written) - 1))
    if data.draw(st.booleans()):
        written = written[:start]
    else:
        junk = data.draw(st.binary(min_size=1, max_size=4))
        written[start : start + len(junk)] = junk
    attempt(cls, bytes(written))


def test_a_kind_of_document_that_is_no_word_is_refused():
    with pytest.raises(InputError):
        decode(ModelProfile, b'{"document": [], "schema_version": 1}', "plan.json")
