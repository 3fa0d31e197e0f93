from tests.unit.octavo.stand_in import stand_in

__all__ = ["stand_in"]
