"""The generated pages of the reference are those of the programs, and a stale one is told."""

from docs import generate

REFERENCE = generate.PAGES


def test_every_generated_page_is_fresh_and_a_stale_one_is_reported(tmp_path, monkeypatch, capsys):
    assert generate.main(["--check"]) == 0, capsys.readouterr().err
    monkeypatch.setattr(generate, "PAGES", tmp_path)
    assert generate.main(["--check"]) == 1
    assert capsys.readouterr().err.count("stale") == len(generate.pages())
    assert generate.main([]) == 0
    for path in generate.pages():
        assert path.read_bytes() == (REFERENCE / path.name).read_bytes(), path.name
    (tmp_path / "agent-metrics.md").write_text("old")
    assert generate.main(["--check"]) == 1
    assert "agent-metrics.md is stale" in capsys.readouterr().err
