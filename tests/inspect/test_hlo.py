"""Reading HLO text: every textual form, against hand-written expectations."""

import pytest

from jaxpar.inspect import hlo

TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%compared (limit: s32[]) -> pred[] {
  %limit = s32[] parameter(0)
  %five = s32[] constant(5)
  ROOT %less = pred[] compare(%limit, %five), direction=LT
}

%condition (state.1: (s32[], f32[8,16])) -> pred[] {
  %state.1 = (s32[], f32[8,16]{1,0}) parameter(0)
  %index.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %again = pred[] fusion(%index.1), kind=kLoop, calls=%compared
}

%body (state.2: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  ROOT %state.2 = (s32[], f32[8,16]{1,0:T(8,128)}) parameter(0)
}

ENTRY %main (x: f32[8,16], y: bf16[4]) -> (f32[8,16], bf16[4]) {
  %x = f32[8,16]{1,0} parameter(0), metadata={op_name="x"}
  %y = bf16[4]{0} parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,16]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[8,16]{1,0}) while(%start), condition=%condition, body=%body
  %known = (s32[], f32[8,16]{1,0}) while(%start), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"7"}}
  %got = f32[8,16]{1,0} get-tuple-element(%loop), index=1
  ROOT %both = ((f32[8,16]{1,0}), /*index=1*/bf16[4]{0:S(5)}) all-reduce-start(%got, /*index=1*/%y), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
}
"""  # noqa: E501


def test_computations_instructions_and_shapes():
    module = hlo.parse(TEXT)
    assert list(module.computations) == ["add", "compared", "condition", "body", "main"]
    root = module.entry.root
    assert (root.name, root.opcode, root.operands) == ("both", "all-reduce-start", ("got", "y"))
    assert root.shapes == (hlo.Shape("f32", (8, 16)), hlo.Shape("bf16", (4,)))
    assert root.output_bytes == 8 * 16 * 4 + 4 * 2
    assert [shape.bytes for shape in module.entry.operand_shapes(root)] == [512, 8]
    assert module.entry.by_name["x"].source == "x"
    assert [user.name for user in module.entry.users["start"]] == ["loop", "known"]
    assert module.computations["body"].root.name == "state.2"
    assert root.called("to_apply") == ("add",) and root.called("calls") == ()


def test_trip_counts_come_from_the_note_or_from_the_constant_in_the_condition():
    module = hlo.parse(TEXT)
    assert module.trip_count(module.entry.by_name["known"]) == 7
    assert module.trip_count(module.entry.by_name["loop"]) == 5
    unknown = hlo.parse(TEXT.replace("constant(5)", "parameter(1)"))
    assert unknown.trip_count(unknown.entry.by_name["loop"]) is None


def test_a_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo.parse("HloModule nothing")


@pytest.mark.parametrize(
    ("dtype", "bytes_of_ten"),
    [("f32", 40), ("bf16", 20), ("f64", 80), ("c64", 80), ("pred", 10), ("s4", 5), ("f8e4m3fn", 10), ("token", 0)],
)
def test_sizes_of_dtypes(dtype: str, bytes_of_ten: int):
    assert hlo.Shape(dtype, (2, 5)).bytes == bytes_of_ten


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['data'=4,'pipe'=1,'tensor'=2] {'tensor'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['data'=4,'pipe'=1,'tensor'=2] {'data'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        # Devices in the order 0 2 4 6 1 3 5 7: the first axis pairs 0 with 1.
        ("mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}", [[7, 6, 5, 4], [3, 2, 1, 0]]),
        # The outer and the inner half of an axis of 8.
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_replica_groups_in_every_form(text: str, groups: list[list[int]]):
    assert hlo.replica_groups(f", channel_id=1, replica_groups={text}, use_global_device_ids=true", 8) == groups


def test_groups_in_an_unknown_form_are_not_guessed():
    with pytest.raises(ValueError, match="unknown form"):
        hlo.replica_groups("replica_groups=<new>", 8)


def test_source_target_pairs():
    assert hlo.source_target_pairs("channel_id=1, source_target_pairs={{0,1},{1,0}}, x") == [[0, 1], [1, 0]]
    assert hlo.source_target_pairs("channel_id=1") == []
