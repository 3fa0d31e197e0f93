import pytest

from tests.unit.octavo.stand_in import stand_in

__all__ = ["stand_in"]


@pytest.fixture(autouse=True)
def every_hub_model_is_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests of this folder name any model, such as some/model; those of models/ have a hub on loopback."""
    if request.path.parent.name != "models":
        monkeypatch.setattr("octavo.models.names.fetch_from_hub", lambda name, progress: None)
