"""Hook of MkDocs: every notebook is a page, with the outputs that it was committed with."""

from pathlib import Path

from mkdocs.structure.files import File
from nbconvert import MarkdownExporter

HERE = Path(__file__).parent


def on_files(files, config):
    """Add the page, its pictures, and the notebook itself to be downloaded."""
    for path in sorted(HERE.glob("*.ipynb")):
        names = {"unique_key": path.stem, "output_files_dir": "."}
        text, found = MarkdownExporter().from_filename(str(path), names)
        # Links are those of the repository.
        text = text.replace("](../docs/", "](../").replace(".ipynb)", ".md)")
        text += f"\n\n[Download this notebook]({path.name})\n"
        folder = HERE.name
        files.append(File.generated(config, f"{folder}/{path.stem}.md", content=text))
        files.append(File.generated(config, f"{folder}/{path.name}", abs_src_path=str(path)))
        for name, picture in found["outputs"].items():
            files.append(File.generated(config, f"{folder}/{Path(name).name}", content=picture))
    return files
