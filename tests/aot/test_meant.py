from __future__ import annotations

import pytest

from kvbuild.aot import meant, targets


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("H100", "nvidia:sm_90"),
        ("nvidia:h100-sxm5-80gb", "nvidia:sm_90"),
        ("NVIDIA L40S", "nvidia:sm_89"),
        ("4090", "nvidia:sm_89"),
        ("nvidia:MI300X", "amd:gfx942"),
        ("rocm:gfx942", "amd:gfx942"),
        ("dcu:K100_AI", "hygon:gfx928"),
        ("iluvatar:bi-v150", "tianshu:ivcore11"),
        ("ascend:910b2", "ascend:910B2"),
        ("Ascend910B2", "ascend:910B2"),
        ("910B", "ascend:910B1, ascend:910B2, ascend:910B3 or ascend:910B4"),
        ("nvidia:sm90", "nvidia:sm_90"),
        ("sm_90a", "nvidia:sm_90"),
        ("nvida", "nvidia"),
        ("nvida:sm_80", "nvidia:sm_80"),
        ("cuda", "nvidia"),
        ("cuda:foo", "nvidia"),
        ("huawei", "ascend"),
        ("CPU", "cpu"),
    ],
)
def test_a_target_by_product_alias_or_spelling(text: str, wanted: str) -> None:
    assert meant.target(text) == f"; did you mean {wanted}?"


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "nvidia:", "nvidia:foo", "intel:xe",
        "nvidia:sm_75", "nvidia:sm_87",  # other chips, not other spellings
        "L400", "910B4-1", "910B2C", "ascend:910B2C", "ascend:Ascend910B2C", "ascend:310P3",
        "amd:gfx906",  # there is one, and it is another vendor's
    ],
)  # fmt: skip
def test_nothing_is_made_of_what_is_something_else(text: str) -> None:
    assert meant.target(text) == ""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("iluvatar", "tianshu"), ("Moore_Threads", "mthreads"), ("asend", "ascend"), ("dcu", "hygon")],
)
def test_a_vendor_by_alias_or_spelling(text: str, wanted: str) -> None:
    assert meant.vendor(text) == f"; did you mean {wanted}?"
    assert meant.vendor("intel") == meant.vendor("") == ""


def test_every_product_leads_to_its_target_and_no_alias_to_two_vendors() -> None:
    aliases = [alias for vendor in targets.names() for alias in (vendor, *targets.load(vendor).ALIASES)]
    assert len(set(aliases)) == len(aliases)
    for vendor in targets.names():
        module = targets.load(vendor)
        assert set(module.CHIPS) <= set(module.ARCHS)
        for arch, products in module.CHIPS.items():
            for product in products:
                assert meant.target(product) == f"; did you mean {vendor}:{arch}?", product
        for alias in module.ALIASES:
            assert meant.vendor(alias) == f"; did you mean {vendor}?"
