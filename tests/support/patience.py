"""How long tests wait for what must come."""

# Only a test that fails waits for so long. On a busy machine everything takes ten times as long as it should.
PATIENCE_S = 120.0
